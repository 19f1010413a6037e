"""`paceline trace`: shows the last backward passes of a running or failed job, as a table or a trace file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ConfigError
from paceline.trace import chrome, jobs
from paceline.trace.ring_file import printable
from paceline.trace.slow_ranks import AT_THE_END, slow_ranks, whole_spans
from paceline.trace.table import render

_DESCRIPTION = """\
Show the last backward passes of all ranks of a job, while it runs or after it has failed. Without a job, list
all jobs that are known. A job is given by its id, by the process id of its launcher, or by the folder in
which it records; for several hosts, give one folder for each host.
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="paceline trace", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="*", help="an id, a process id, or folders")
    parser.add_argument("--output", metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--passes", type=int, default=5, metavar="N", help="how many backward passes to show (default: 5)"
    )
    parsed = parser.parse_args(arguments)
    if not parsed.job:
        return _list()
    folders = [jobs.find(name) for name in parsed.job]
    recordings = jobs.read(folders)
    facts = jobs.facts_of(folders[0])
    if facts is not None:
        print(f"{facts.name}, {facts.nprocs} ranks, started {jobs.age(facts)}: {facts.state}\n")
    print(render(recordings, max(1, parsed.passes)))
    for slow in slow_ranks(whole_spans(recordings), AT_THE_END):
        print(f"\n{slow.sentence()}")
    if parsed.output is not None:
        chrome.write(Path(parsed.output), recordings)
        print(f"\nThe trace is in {parsed.output}.")
    return 0


def _list() -> int:
    found = jobs.jobs()
    if taken := jobs.squatter():
        raise ConfigError(
            "Your jobs record nothing.",
            seen=taken,
            hint="have it removed, or set TMPDIR to a folder of yours, for the jobs and for this command",
        )
    if not found:
        print("No job is running or has failed that has recorded its backward passes.", file=sys.stderr)
        return 1
    for folder, facts in found:
        print(
            f"{printable(folder.name)}  {jobs.age(facts)}  {facts.nprocs} ranks  {facts.name}: {facts.state}"
        )
    return 0
