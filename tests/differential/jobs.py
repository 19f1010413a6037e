"""Many programs, several of them side by side. Independent of the framework.

A job is a forked process with its own session, and gets one seed after the other. Ranks of a program wait for
each other most of the time, so one job more than there are cores keeps the cores busy.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.differential.judge import EQUAL, KNOWN, REFUSED, Verdict
from tests.differential.pool import Worker
from tests.differential.programs import Program, features
from tests.differential.records import Lost
from tests.differential.session import Finding, Session, in_every_mode

SILENT_S = 600.0
"""If no job answers for this long, the fuzzer itself is broken: programs have shorter deadlines."""


def default_jobs() -> int:
    """The number of programs that run side by side."""
    return len(os.sched_getaffinity(0)) + 1


@dataclass(frozen=True)
class Checked:
    """The results of the program of one seed: a verdict by mode.

    Attributes:
        incumbents: The same of the framework's own wrapper.
    """

    program: Program
    verdicts: dict[str, Verdict]
    incumbents: dict[str, Verdict]
    findings: list[Finding]


@dataclass
class Tally:
    """The outcomes of many programs: in all, by mode and by feature.

    Attributes:
        by_incumbent: Outcomes of the framework's own wrapper, which are in no other count.
        differences: The known ones among these, and how often each was seen.
    """

    programs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    by_mode: dict[str, Counter[str]] = field(default_factory=dict)
    by_feature: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    by_incumbent: dict[str, Counter[str]] = field(default_factory=dict)
    differences: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, checked: Checked) -> None:
        self.programs += 1
        self.findings.extend(checked.findings)
        for mode, verdict in checked.verdicts.items():
            self.outcomes[verdict.kind] += 1
            self.by_mode.setdefault(mode, Counter())[_outcome(verdict)] += 1
            for feature in features(checked.program):
                self.by_feature.setdefault(feature, Counter())[_column(verdict)] += 1
            if verdict.kind == REFUSED:
                self.refusals[verdict.error] += 1
        for mode, verdict in checked.incumbents.items():
            self.by_incumbent.setdefault(mode, Counter())[_outcome(verdict)] += 1
            if verdict.kind == KNOWN:
                self.differences[verdict.error] += 1


def check_seed(session: Session, program: Program, shrink_s: Callable[[str], float]) -> Checked:
    """Check a program in each of its modes; spend this many seconds on shrinking a finding of each kind."""
    checked = Checked(program, {}, {}, [])
    for mode in dict.fromkeys(program["modes"]):  # a program may name one twice
        verdict, finding = session.find(program, mode, seconds=shrink_s)
        (checked.incumbents if session.is_incumbent(mode) else checked.verdicts)[mode] = verdict
        if finding is not None:
            checked.findings.append(finding)
    return checked


def run_many(
    frontend: Any,
    make_session: Callable[[], Session],
    seeds: Iterable[int],
    *,
    jobs: int = 1,
    until_s: float | None = None,
    report: Callable[[Finding], None] | None = None,
    shrink_s: float = 15.0,
    every_mode: bool = False,
) -> Tally:
    """Check the programs of these seeds, each in its modes or in every mode.

    The first findings of a kind are shrunk.
    """
    tally = Tally()
    begun = time.monotonic()
    left = iter(seeds)

    def next_task() -> tuple[Any, ...] | None:
        if until_s is not None and time.monotonic() - begun > until_s:
            return None
        kinds = Counter(finding.verdict.kind for finding in tally.findings)
        enough = [kind for kind, count in kinds.items() if count >= 3]
        return next(((seed, enough) for seed in left), None)

    def make() -> Callable[[int, list[str]], Checked]:
        session = make_session()

        def check(seed: int, enough: list[str]) -> Checked:
            program = frontend.generate(seed)
            program = in_every_mode(frontend, program) if every_mode else program
            return check_seed(session, program, lambda kind: 0.0 if kind in enough else shrink_s)

        return check

    with _workers(make, jobs) as workers:
        for checked in _answers(workers, next_task):
            tally.add(checked)
            for finding in checked.findings if report is not None else ():
                report(finding)
    tally.seconds = time.monotonic() - begun
    return tally


@contextmanager
def _workers(make: Callable[[], Any], jobs: int) -> Iterator[list[Worker]]:
    """The running jobs. When one is killed, the kernel kills its ranks; their leftovers lie in one folder."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as folder:
        workers: list[Worker] = []
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            for job in range(jobs):
                pipes = [worker.pipe for worker in workers]
                workers.append(Worker(make, Path(folder) / f"job-{job}.log", pipes))
            yield workers
        finally:
            tempfile.tempdir = before
            for worker in workers:
                worker.end()


def _answers(workers: list[Worker], next_task: Callable[[], tuple[Any, ...] | None]) -> Iterator[Checked]:
    """Give each idle job a task, until there are no more tasks."""
    busy: dict[Any, tuple[Worker, tuple[Any, ...]]] = {}
    idle = list(workers)
    while True:
        while idle and (task := next_task()) is not None:
            worker = idle.pop()
            worker.ask(task)
            busy[worker.pipe] = (worker, task)
        if not busy:
            return
        ready = wait(list(busy), timeout=SILENT_S)
        for pipe in ready or list(busy):
            worker, task = busy.pop(pipe)
            answer = worker.answer() if ready else None
            if answer is None or isinstance(answer, Lost):
                output = worker.tail() if answer is None else answer.stacks
                raise RuntimeError(f"the fuzzer itself failed at seed {task[0]}:\n{output}")
            idle.append(worker)
            yield answer


def _outcome(verdict: Verdict) -> str:
    return "finding" if verdict.is_finding else verdict.kind


def _column(verdict: Verdict) -> str:
    return (
        verdict.kind if verdict.kind in (EQUAL, REFUSED) else ("finding" if verdict.is_finding else "other")
    )
