"""make incumbents: torch's own tests on Paceline, compared with the expected result of each.

python -m tests.incumbents                                  # all; some two minutes
python -m tests.incumbents --part ddp --tests 'test_ddp_*'  # those of these names; shows why they stop
python -m tests.incumbents --subject torch                  # torch's own class, and Gloo; nothing is expected
python -m tests.incumbents --tables                         # those of outcomes.md
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ |= ONE_THREAD  # before torch reads them: ranks share the cores

import torch  # noqa: E402

from tests.incumbents import outcomes, run, stand_ins  # noqa: E402

DEADLINE_S = 120.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.incumbents", description=__doc__)
    parser.add_argument("--part", choices=("ddp", "collectives"), help="the tests of one of them only")
    parser.add_argument("--tests", nargs="+", default=[], help="only these; patterns")
    parser.add_argument("--subject", choices=("paceline", "torch"), default="paceline")
    parser.add_argument("--jobs", type=int, default=3, help="how many tests run at a time")
    parser.add_argument("--tables", action="store_true", help="print the tables of the page, and end")
    given = parser.parse_args(arguments)
    known = outcomes.parts()
    if given.tables:
        print("\n".join(f"{part.count()}\n\n{part.table()}" for part in known.values()))
        return 0
    if torch.__version__.split("+")[0] != outcomes.version():
        print(f"{outcomes.DATA.name} is about torch {outcomes.version()}; this is {torch.__version__}")
        return 2
    problems = 0
    for part in known.values() if given.part is None else [known[given.part]]:
        # A process for each: the patches for one part would interfere with the other.
        pid = os.fork()
        if not pid:
            os._exit(min(_run(part, known, given), 100))
        problems += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return int(problems > 0)


def _run(part: outcomes.Part, known: dict[str, outcomes.Part], given: argparse.Namespace) -> int:
    """Run the tests of a part; return the number of unexpected results."""
    tests = _tests(part.name)
    there = [name for name in dir(tests) if name.startswith("test_")]
    problems = outcomes.strangers(known, there)
    for problem in problems:
        print(problem)
    names = [name for name in part.names if name in there]
    if given.tests:
        names = [name for name in names if any(fnmatch(name, text) for text in given.tests)]
    began_s, kinds = time.monotonic(), Counter[str]()
    prepare = functools.partial(_prepare, part.name, given.subject)
    for name, outcome in run.run_all(tests, names, prepare, deadline_s=DEADLINE_S, jobs=given.jobs):
        kinds[outcome.kind] += 1
        problem = part.unexpected(name, outcome) if given.subject == "paceline" else None
        if problem is not None:
            problems.append(problem)
            print(f"{name} {problem}")
        elif given.subject == "torch" and outcome.kind == "stops":
            print(f"{name} stops: {outcome.last_words}")
        if outcome.kind == "stops" and (problem is not None or given.tests):
            print(outcome.seen)
        sys.stdout.flush()
    counts = ", ".join(f"{kinds[kind]} {what}" for kind, what in _SAID.items())
    print(f"{part.name}, {given.subject}: {counts}; {time.monotonic() - began_s:.0f} s")
    if given.subject == "paceline":
        print(f"{len(problems)} not as {outcomes.DATA.name} says" if problems else "all as expected")
    sys.stdout.flush()
    return len(problems)


_SAID = {"passes": "pass", "skips": "skip themselves", "stops": "stop"}


def _tests(part: str) -> type:
    """torch's test class, which torch's own test files make in this way."""
    module = stand_ins.load(needs_no_gpu=part == "ddp")
    stand_ins.let_ranks_be_late(module, DEADLINE_S)
    importlib.import_module("paceline.torch")  # once, for all ranks

    return type("Tests", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def _prepare(part: str, subject: str) -> None:
    """Prepare a rank for its test."""
    steps: dict[tuple[str, str], list[Callable[[], None]]] = {
        ("ddp", "paceline"): [
            stand_ins.stand_in_for_gpus,
            stand_ins.use_paceline_for_ddp,
        ],
        ("ddp", "torch"): [stand_ins.stand_in_for_gpus],
        ("collectives", "paceline"): [stand_ins.use_paceline_for_gloo],
        ("collectives", "torch"): [],
    }
    for step in steps[part, subject]:
        step()
    if part == "ddp":
        stand_ins.wrap_on_cpu(torch.nn.parallel.DistributedDataParallel)


if __name__ == "__main__":
    sys.exit(main())
