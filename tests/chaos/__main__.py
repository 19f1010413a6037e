"""The command line: python -m tests.chaos --faults 1000 --seed 0; --one 17 for one with all its output.

Resume an interrupted run with --resume FILE; a run prints the name of its file at its start.
"""

# ruff: noqa: E402  # the environment comes before whatever imports numpy

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before a framework is imported: ranks are forked, threads are not

import argparse
import gc
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.chaos.journal import Journal
from tests.chaos.launched import run_launched
from tests.chaos.plans import Plan, for_torch, plan_of
from tests.chaos.report import Row, details, report_of
from tests.chaos.trial import Result, run_all

_ROOT = Path(__file__).parents[2]
_TORCHS = "torch's own DDP"
_REPEATS = 2
_MORE_PATIENT = 4

Run = Callable[[Iterable[Plan]], Iterator[Result]]


def main() -> int:
    """Run the command line; the exit status is 1 if there are findings."""
    arguments = _arguments()
    if arguments.one is not None:
        return _one(arguments)
    journal = _journal(arguments)
    asked = argparse.Namespace(**journal.asked)
    first, count = asked.seed, asked.faults
    launched = count * asked.launched // 100
    paddle = count * asked.paddle // 100
    ours: list[Row] = []
    for name, number in (("torch", count - launched - paddle), ("paddle", paddle)):
        plans = [plan_of(seed, name) for seed in range(first, first + number)]
        ours += _in_a_fork(plans, name, arguments.at_once, journal, name)
    plans = [plan_of(seed, launched=True) for seed in range(first, first + launched)]
    _judge_all(plans, run_launched, journal, "launched")
    ours += journal.rows("launched")
    spent_s = journal.spent_s
    seeds = range(first, first + 10 * asked.torchs)
    given = [plan for seed in seeds if (plan := for_torch(plan_of(seed))) is not None][: asked.torchs]
    torchs = _in_a_fork(given, "torch", arguments.at_once, journal, _TORCHS)
    report = report_of(ours, torchs, _command(asked), spent_s)
    report.show()
    if arguments.markdown is not None:
        print(f"written to {report.write_markdown(Path(arguments.markdown))}")
    return 0 if report.is_complete else 1


def _journal(arguments: argparse.Namespace) -> Journal:
    """The journal of a new run, or of an interrupted one."""
    if arguments.resume is not None:
        journal = Journal(Path(arguments.resume))
        print(f"Resumes {journal.path}: {journal.asked}", flush=True)
        for part in ("torch", "paddle", "launched"):
            for row in journal.rows(part):
                _print_findings(row)
        return journal
    asked = {name: getattr(arguments, name) for name in ("seed", "faults", "paddle", "launched", "torchs")}
    moment = time.strftime("%Y-%m-%dT%H%M%S")
    path = arguments.rows or _ROOT / "build" / "chaos" / f"{moment}-{os.getpid()}.jsonl"
    journal = Journal.begin(Path(path), asked)
    print(f"If this is interrupted, --resume {journal.path} goes on with it.", flush=True)
    return journal


def _command(asked: argparse.Namespace) -> str:
    return f"make chaos FAULTS={asked.faults} SEED={asked.seed} TORCHS={asked.torchs}"


def _in_a_fork(plans: Sequence[Plan], framework: str, at_once: int, journal: Journal, part: str) -> list[Row]:
    """Run trials in a child, which imports the framework: two frameworks in one process affect each other."""
    if {plan.seed for plan in plans} - {row.seed for row in journal.rows(part)}:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                make = importlib.import_module(f"tests.chaos.{framework}_rank").make_trainer
                gc.collect()
                gc.freeze()  # a fork would copy the pages of garbage first
                _judge_all(plans, lambda some: run_all(some, make, at_once), journal, part)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"the trials of {part} broke off, status {status}")
    return journal.rows(part)


def _judge_all(plans: Sequence[Plan], run: Run, journal: Journal, part: str) -> None:
    """Make a row for each plan that has none; repeat a trial that a busy machine has made void."""
    is_ours = part != _TORCHS
    done = {row.seed for row in journal.rows(part)}
    plans = [plan for plan in plans if plan.seed not in done]
    for attempt in range(1 + _REPEATS):
        again: list[Plan] = []
        for result in run(plans):
            row = Row.of(result)
            if row.verdict.is_void and is_ours and attempt < _REPEATS:
                again.append(replace(result.plan, timeout_s=_MORE_PATIENT * result.plan.timeout_s))
                continue
            journal.add(part, row)
            if is_ours:
                _print_findings(row)
        plans = again
        if not plans:
            break


def _print_findings(row: Row) -> None:
    if row.verdict.wrong:
        print(row.plan, *row.verdict.wrong, sep="\n   ")
        print(f"{row.details}\n", flush=True)


def _one(arguments: argparse.Namespace) -> int:
    """Run one fault, and print how each rank ended."""
    plan = plan_of(arguments.one, arguments.framework, launched=arguments.launcher)
    if arguments.torchs:
        given = for_torch(plan)
        if given is None:
            raise SystemExit(f"{plan}: cannot be given to torch's own DDP")
        plan = given
    if arguments.launcher:
        result = next(run_launched([plan]))
    else:
        make = importlib.import_module(f"tests.chaos.{arguments.framework}_rank").make_trainer
        result = next(run_all([plan], make))
    row = Row.of(result)
    print(row.plan, *row.verdict.wrong, sep="\n   ")
    print(details(result))
    if result.launcher is not None:
        print(f"the launcher ended with status {result.launcher[0]}")
    verdict = row.verdict
    print(f"{verdict.outcome}; {verdict.named} of {verdict.survivors} name it; {verdict.seconds}")
    return 1 if row.verdict.wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first fault")
    parser.add_argument("--faults", type=int, default=100, help="how many")
    parser.add_argument("--paddle", type=int, default=12, help="per cent of them in jobs of Paddle")
    parser.add_argument("--launched", type=int, default=2, help="per cent of them under launchers")
    parser.add_argument("--torchs", type=int, default=0, help="give so many to torch's own DDP, too")
    parser.add_argument("--at-once", type=int, default=2, help="trials that run beside each other")
    parser.add_argument("--one", type=int, help="only the fault of this seed, with all that was printed")
    parser.add_argument("--framework", default="torch", help="with --one")
    parser.add_argument("--launcher", action="store_true", help="with --one: that under a launcher")
    parser.add_argument("--rows", help="write the rows to this new file; by default one in build/chaos")
    parser.add_argument("--resume", metavar="FILE", help="go on with the run whose rows are there")
    parser.add_argument("--markdown", help="write the table to this file, or to one in this folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
