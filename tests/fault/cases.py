"""Runs programs with faults, many in one process start, and returns the outcome of each rank.

A harness rank, which is in no group, forks the ranks of each case; so a case costs milliseconds. The driver
sees how each of them ended, and the survivors hand in the errors that they raised.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import paceline
from paceline import _core
from paceline.errors import PacelineError
from tests.fault.faults import Action, Fault
from tests.harness import run_ranks

_MOST_STEPS = 10_000  # a fault that has not struck by then is at a point that the program does not pass
_PATIENCE_S = 90.0


@dataclass(frozen=True)
class Case:
    """`world_size` ranks run `program`, and the faults strike.

    `kills_stopped`: when all ranks that a fault stops have stopped, they are killed, all at once.
    """

    program: Callable[[Any], Callable[[int], None]]
    faults: tuple[Fault, ...]
    world_size: int = 3
    timeout_s: float = 60.0
    without_waitv: bool = False
    kills_stopped: bool = False

    def __str__(self) -> str:
        return f"{self.program.__name__}: {' and '.join(map(str, self.faults))}"


@dataclass(frozen=True)
class Seen:
    """How one rank ended."""

    status: int  # negative: the signal that ended it
    kind: str = ""  # of the exception
    text: str = ""
    ranks: tuple[int, ...] = ()  # the ranks that it names: `lost` or `late`
    after_s: float = 0.0  # the time from the kill of `kills_stopped` to its error
    queued_s: float = 0.0  # the part of these in which it was ready to run and had no core


@dataclass
class _Running:
    case: Case
    pids: list[int]
    pipes: list[int]
    killed_s: float = 0.0
    before_s: dict[int, float] = field(default_factory=dict)  # of a rank without a core, until the kill
    seen: dict[int, Seen] = field(default_factory=dict)


def run_cases(cases: list[Case], at_once: int = 2, framework: str = "torch") -> list[list[Seen]]:
    """The outcome of every rank of every case. A rank that was stopped is killed when the others have ended.

    Args:
        at_once: How many cases run side by side.
        framework: The framework that the ranks have imported, so that a program needs no time for it.

    Raises:
        RanksFailed: A rank hung, or something was left behind.
    """
    options = {"cases": cases, "at_once": at_once}
    (answers,) = run_ranks(_drive, 1, options, group=None, framework=framework, deadline_s=300.0)
    return answers


def _drive(_: int, cases: list[Case], at_once: int) -> list[list[Seen]]:
    answers = []
    for begin in range(0, len(cases), at_once):
        running = [_start(case, begin + i) for i, case in enumerate(cases[begin : begin + at_once])]
        answers += [_finish(each) for each in running]
    return answers


def _start(case: Case, number: int) -> _Running:
    job_id = f"{os.environ['PACELINE_JOB_ID']}/{number}"
    pids, pipes = [], []
    for rank in range(case.world_size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run_rank(case, rank, job_id, writing)
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
    return _Running(case, pids, pipes)


def _run_rank(case: Case, rank: int, job_id: str, writing: int) -> None:
    """Run a rank in the forked child; does not return."""
    status = 1
    try:
        _core.disable_futex_waitv(case.without_waitv)
        group = paceline.init(
            rank=rank,
            world_size=case.world_size,
            job_id=job_id,
            timeout_s=case.timeout_s,
            forming_timeout_s=60,  # a slow start is no fault
        )
        step = case.program(group)
        group.barrier(timeout_s=60)
        for number in range(_MOST_STEPS):
            for fault in case.faults:
                fault.arm(rank, number)
            step(number)
    except BaseException as error:
        raised_s = time.monotonic()
        if not isinstance(error, PacelineError) or "injected" in str(error):
            sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter would
        named = getattr(error, "lost", ()) or getattr(error, "late", ())
        # The driver makes the times relative.
        seen = Seen(0, type(error).__name__, str(error), named, raised_s, _queued_s(os.getpid()))
        with contextlib.suppress(OSError), os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(seen))
        status = 0
    finally:
        os._exit(status)


def _finish(running: _Running) -> list[Seen]:
    """Wait for all ranks; kill ranks that a fault has stopped, at the end or as the case says."""
    waiting = dict(enumerate(running.pids))
    stopping = {fault.rank for fault in running.case.faults if fault.action is Action.STOP}
    stopped: set[int] = set()
    until = time.monotonic() + _PATIENCE_S
    while waiting and time.monotonic() < until:
        for rank, pid in list(waiting.items()):
            done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if done and os.WIFSTOPPED(status):
                stopped.add(rank)
            elif done:
                running.seen[rank] = _read(running, rank, os.waitstatus_to_exitcode(status))
                del waiting[rank]
        if stopped == stopping and running.case.kills_stopped and not running.killed_s:
            running.before_s = {rank: _queued_s(pid) for rank, pid in enumerate(running.pids)}
            running.killed_s = time.monotonic()
            for rank in stopped:
                os.kill(running.pids[rank], signal.SIGKILL)
        elif set(waiting) == stopped and not running.killed_s:
            break
        time.sleep(0.001)
    for rank, pid in waiting.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        running.seen[rank] = Seen(-signal.SIGSTOP, "stopped" if rank in stopped else "hung")
    for pipe in running.pipes:
        os.close(pipe)
    return [_since_the_kill(running, rank) for rank in range(running.case.world_size)]


def _since_the_kill(running: _Running, rank: int) -> Seen:
    seen, before = running.seen[rank], running.before_s
    if not before or not seen.kind:
        return seen
    return replace(seen, after_s=seen.after_s - running.killed_s, queued_s=seen.queued_s - before[rank])


def _queued_s(pid: int) -> float:
    """The time in which a process was ready to run and had no core; 0 if the kernel does not report it."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _read(running: _Running, rank: int, status: int) -> Seen:
    """The outcome that a rank handed in, with its exit status."""
    parts = []
    pipe = running.pipes[rank]
    while select.select([pipe], [], [], 0)[0] and (part := os.read(pipe, 1 << 16)):
        parts.append(part)
    if not parts:
        return Seen(status)
    seen: Seen = pickle.loads(b"".join(parts))
    return replace(seen, status=status)
