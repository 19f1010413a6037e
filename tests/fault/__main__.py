"""The command line of the pairs of faults: python -m tests.fault --minutes 10; see `pairs.py`.

The cases run in parts: one program with one kind of fault each. A part that has run at this commit is not run
again, so the same command resumes a run that was interrupted or ran out of minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.fault.pair_parts import KINDS, PROGRAMS, all_parts
from tests.fault.pair_report import Journal, report_of

_ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the command line. Exit status 1: there are findings; 2: parts remain."""
    arguments = _arguments()
    commit = _commit()
    journal = Journal(Path(arguments.journal), commit)
    parts = [
        part
        for part in all_parts()
        if part.program.__name__ in arguments.programs and part.kind in arguments.kinds
    ]
    until_s = time.monotonic() + 60 * arguments.minutes
    left = [part for part in parts if arguments.anew or str(part) not in journal.found()]
    while left and time.monotonic() < until_s:
        part = left.pop(0)
        begun_s = time.monotonic()
        found = part.run()
        journal.add(part, found)
        print(
            f"{part}: {found.cases} cases, {found.struck} struck, {found.partly} partly, "
            f"{found.unstruck} not, {len(found.wrong)} findings, {time.monotonic() - begun_s:.0f} s, "
            f"{found.cpu_s:.0f} s of CPU",
            flush=True,
        )
        for each in found.wrong:
            print(f"   {each}", flush=True)
    report = report_of(journal.found(), "make pairs", commit)
    report.show()
    if left:
        print(f"{len(left)} of {len(parts)} parts are left; the same command goes on with them.")
        return 2 if report.is_complete else 1
    if arguments.output is not None:
        print(f"written to {report.write_markdown(Path(arguments.output))}")
    return 0 if report.is_complete else 1


def _commit() -> str:
    """The commit of the working tree, with "+" if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _arguments() -> argparse.Namespace:
    names = [program.__name__ for program in PROGRAMS]
    parser = argparse.ArgumentParser(prog="python -m tests.fault", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="begin no part after so many")
    parser.add_argument("--programs", nargs="+", choices=names, default=names, metavar="PROGRAM")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--anew", action="store_true", help="run parts that have run before, too")
    parser.add_argument("--journal", default=_ROOT / "build" / "pairs.jsonl", help="what has run so far")
    parser.add_argument(
        "--output", help="when all has run, write the table to this file, or to one in this folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
