"""The command line of the benchmarks: `python -m benchmarks step --help`."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    all_reduce,
    checkpoint,
    data,
    hook,
    killed,
    memory,
    optimizer,
    start,
    step,
    throughput,
    trace,
)
from benchmarks.runner import Benchmark, Settings, choose, show_progress
from paceline import units
from paceline.errors import ConfigError

BENCHMARKS = {
    "all_reduce": all_reduce.BENCHMARK,
    "step": step.BENCHMARK,
    "killed": killed.BENCHMARK,
    "memory": memory.BENCHMARK,
    "optimizer": optimizer.BENCHMARK,
    "throughput": throughput.BENCHMARK,
    "features": step.OPTIONS,
    "hook": hook.BENCHMARK,
    "trace": trace.BENCHMARK,
    "data": data.BENCHMARK,
    "start": start.BENCHMARK,
    "checkpoint": checkpoint.BENCHMARK,
    "virtual_ranks": step.VIRTUAL_RANKS,
}
_EPILOG = """\
The cases take turns, round after round, so that other load on the machine slows all of them alike.
To keep a result: --output benchmarks/results writes a table and a JSON file with every sample there.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all benchmarks."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure Paceline beside Gloo, Open MPI and torch's DDP."
    )
    subparsers = made.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        _add_arguments(
            subparsers.add_parser(
                name,
                help=benchmark.help,
                description=benchmark.help,
                epilog=_EPILOG,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            ),
            benchmark,
        )
    return made


def _add_arguments(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    add = parser.add_argument
    if benchmark.has_ranks:
        add("--ranks", type=units.at_least(2), default=2, metavar="N", help="processes (default 2)")
    what = f"samples of each case (default {benchmark.rounds})"
    add("--rounds", type=units.at_least(1), default=benchmark.rounds, metavar="N", help=what)
    add("--only", type=units.listed(str), default=(), metavar="A,B", help="keys of cases (default: all)")
    add(
        "--before",
        default="",
        metavar="PYTHON",
        help="interpreter with another version of Paceline installed, to measure in the same rounds",
    )
    if benchmark.has_starts:
        add(
            "--starts",
            type=units.at_least(1),
            default=1,
            metavar="N",
            help="start all processes anew N times, and divide the rounds among the starts (default 1)",
        )
    add("--output", type=Path, metavar="FOLDER", help="write the table, and JSON with every sample")
    benchmark.add_arguments(parser)
    parser.set_defaults(ranks=2 if benchmark.has_ranks else 1, starts=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return the exit status, which is 2 if an argument is wrong."""
    given = parser().parse_args(arguments)
    benchmark = BENCHMARKS[given.benchmark]
    try:
        settings = _settings(given, benchmark)
    except ConfigError as error:
        print(f"python -m benchmarks {given.benchmark}: {error}", file=sys.stderr)
        return 2
    report = benchmark.run(settings, given)
    show_progress("")
    report.show()
    if given.output:
        print(f"written: {report.write_markdown(given.output)}")
    return 0 if report.is_complete else 1


def _settings(given: argparse.Namespace, benchmark: Benchmark) -> Settings:
    """Check all arguments, before a measurement that takes minutes."""
    if given.output and not given.output.is_dir():
        raise ConfigError(f"--output {given.output}: there is no such folder.")
    if given.before and shutil.which(given.before) is None:
        raise ConfigError(
            f"--before {given.before}: there is no such program.",
            hint="a Python interpreter, such as .venv-before/bin/python",
        )
    return Settings(
        cases=choose(benchmark.cases(given), given.only, given.before),
        ranks=given.ranks,
        rounds=given.rounds,
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        show=show_progress,
        environment=benchmark.environment(given),
        starts=given.starts,
    )


if __name__ == "__main__":
    sys.exit(main())
