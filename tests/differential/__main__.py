"""The command line: python -m tests.differential --seeds 0:100, or --seed 17 for one with its program."""

# ruff: noqa: E402  # the environment comes before whatever imports numpy

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before a framework is imported: ranks are forked, threads are not

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.differential.driver import seeds_of
from tests.differential.jobs import default_jobs, run_many
from tests.differential.pool import DEADLINE_S
from tests.differential.programs import Program, show
from tests.differential.report import Campaign, table, write
from tests.differential.session import Finding, Session, in_every_mode


def main() -> int:
    """Run the command line; the exit status is 1 if there are findings."""
    arguments = _arguments()
    frontend = importlib.import_module(f"tests.differential.{arguments.framework}_frontend")
    if arguments.program is not None or arguments.seed is not None:
        if arguments.program is not None:
            program = json.loads(Path(arguments.program).read_text())
        else:
            program = frontend.generate(arguments.seed)
        if arguments.every_mode:
            program = in_every_mode(frontend, program)
        return _one(frontend, program, arguments)
    if arguments.corpus:
        return _corpus(frontend, arguments)
    seeds = seeds_of(arguments.seeds)
    until_s = None if arguments.minutes is None else 60 * arguments.minutes
    tally = run_many(
        frontend,
        lambda: Session(frontend, arguments.mutation, arguments.deadline),
        seeds,
        jobs=arguments.jobs,
        until_s=until_s,
        report=_print_finding,
        shrink_s=arguments.shrink_seconds,
        every_mode=arguments.every_mode,
    )
    begin = int(arguments.seeds.partition(":")[0] or 0)
    again = f"make fuzz FRAMEWORK={arguments.framework} SEEDS={begin}:{begin + tally.programs}"
    if arguments.every_mode:
        again += " ARGS='--every-mode'"
    text = table(tally, Campaign(arguments.framework, begin, again))
    print(text)
    if arguments.output is not None:
        print(f"Written to {write(text, Path(arguments.output), arguments.framework)}")
    return 1 if tally.findings else 0


def _one(frontend: Any, program: Program, arguments: argparse.Namespace) -> int:
    print(show(program))
    if arguments.show:
        return 0
    modes = [arguments.mode] if arguments.mode else program["modes"]
    status = 0
    with Session(frontend, arguments.mutation, arguments.deadline) as session:
        for mode in modes:
            if arguments.shrink:
                verdict, finding = session.find(program, mode, seconds=lambda kind: 60.0)
            else:
                verdict, finding = session.check(program, mode), None
            print(f"\n--- {mode}: {verdict.kind} {verdict.error}\n{verdict.text}")
            if finding is not None:
                print(f"\nsmallest:\n{finding}\n{json.dumps(finding.program)}")
            status |= verdict.is_finding
    return status


def _corpus(frontend: Any, arguments: argparse.Namespace) -> int:
    """Run every program that has found a bug, in the modes in which it did."""
    found = 0
    with Session(frontend, arguments.mutation, arguments.deadline) as session:
        for name, program in frontend.CORPUS.items():
            for mode in program["modes"]:
                verdict = session.check(program, mode)
                is_open = name in frontend.OPEN
                found += verdict.is_finding and not is_open
                note = " (known, and open)" if is_open else ""
                print(f"{name}, {mode}: {verdict.kind} {verdict.error}{note}", flush=True)
                if verdict.is_finding and not is_open:
                    print(f"at op {verdict.at}\n{verdict.text}\n{show(program)}\n")
    return 1 if found else 0


def _print_finding(finding: Finding) -> None:
    print(f"\n=== {finding}\n{json.dumps(finding.program)}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--seeds", default="0:200", help="a range, 0:200, or the first one of as many as fit")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="programs that run side by side")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, help="one program, shown in full")
    parser.add_argument("--program", help="a file with one program as JSON")
    parser.add_argument("--corpus", action="store_true", help="the programs that have found a bug")
    parser.add_argument(
        "--every-mode",
        action="store_true",
        help="each program in all modes in which it can run, and under the framework's own wrapper",
    )
    parser.add_argument("--mode", help="with --seed: only in this mode")
    parser.add_argument("--show", action="store_true", help="with --seed: do not run it")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for one program")
    parser.add_argument("--shrink", action="store_true", help="with --seed: make it small if it fails")
    parser.add_argument("--shrink-seconds", type=float, default=15.0, help="for each of the first findings")
    parser.add_argument("--mutation", help="put this bug in")
    parser.add_argument("--output", help="write the table to this file, or into this folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
