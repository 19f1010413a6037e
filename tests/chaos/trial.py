"""One trial: ranks that are forked from this process, a fault, and the leftovers when all ranks have ended.

The calling process has imported the framework and has run nothing of it, so it has no other thread. Several
trials run side by side (`run_all`): a trial in which the ranks wait for a time-out needs no core.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import board as progress
from tests.chaos.board import Board
from tests.chaos.plans import Fault, Plan
from tests.chaos.rank import Report, end_fork
from tests.chaos.strikes import Striker, signal_of
from tests.harness.leftovers import left_in_folder, left_in_shm, left_running, shm_names
from tests.harness.rank_main import die_with

MakeTrainer = Callable[[Plan, int, str, Path, Striker], Any]

STACKS_SIGNAL = signal.SIGRTMAX
_HANG_S = 45.0
"""The time that a trial may take beyond its time-out: on a busy machine all of it is computing."""
_TICK_S = 0.001
_PAUSE_S = 0.3
"""The longest stop of a rank that is continued in time."""
_LARGEST_DELAY_S = 0.004

_lifeline: list[int] = []  # both ends of a pipe; the kernel kills the ranks when this process loses its end


@dataclass(frozen=True)
class Ended:
    """How one rank ended, seen from outside.

    Attributes:
        status: Exit status; negative: the signal that ended it.
        report: The rank's own report; None: it made none.
        how: "", or "stopped" (until it was killed at the end), or "hung".
        output: The end of its output.
    """

    status: int
    report: Report | None
    how: str = ""
    output: str = ""


@dataclass(frozen=True)
class Result:
    """How a trial ended.

    Attributes:
        ranks: By rank.
        struck_s: When the fault struck (time.monotonic()); 0: it did not, or the time is unknown.
        was_struck: Whether it did, before the rank had finished.
        was_last: Whether the rank was in its last step by then; the others may not need it any more.
        left: The leftovers, in words.
        took_s: Seconds.
        launcher: Exit status of the launcher, and its output.
    """

    plan: Plan
    ranks: tuple[Ended, ...]
    struck_s: float
    was_struck: bool
    was_last: bool
    left: tuple[str, ...]
    took_s: float
    launcher: tuple[int, str] | None = None


def run_all(
    plans: Iterable[Plan], make_trainer: MakeTrainer, at_once: int = 2, waiting: int = 8
) -> Iterator[Result]:
    """Run trials, `at_once` of them side by side and up to `waiting` that only wait for a time-out."""
    todo = iter(plans)
    running: list[Trial] = []
    is_over = False
    while running or not is_over:
        while (
            not is_over and len(running) < waiting and sum(not trial.is_idle() for trial in running) < at_once
        ):
            plan = next(todo, None)
            if plan is None:
                is_over = True
            else:
                running.append(Trial(plan, make_trainer))
        for trial in list(running):
            result = trial.look()
            if result is not None:
                running.remove(trial)
                yield result
        time.sleep(_TICK_S)


@dataclass
class _Rank:
    pid: int
    log: Path
    ended: Ended | None = None
    is_stopped: bool = False
    stopped_s: float = 0.0
    was_continued: bool = False


class Trial:
    """A plan that runs. Call `look()` until it returns a result."""

    def __init__(self, plan: Plan, make_trainer: MakeTrainer) -> None:
        self.plan = plan
        self._shm_before = shm_names()
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        (self._folder / "tmp").mkdir()
        self._board = Board(self._folder / "board", plan.job.world_size)
        self._begun_s = time.monotonic()
        self._striking = Outside(plan.fault)
        self._idle_since = 0.0
        if not _lifeline:
            _lifeline.extend(os.pipe())
        job = uuid.uuid4().hex
        sys.stdout.flush()
        sys.stderr.flush()
        self._ranks = [self._fork(rank, job, make_trainer) for rank in range(plan.job.world_size)]

    def is_idle(self) -> bool:
        """True if its ranks only wait for a rank that does not come."""
        if not self.plan.is_late:
            return False
        struck = self._board.struck_at_s(self.plan.fault.rank)
        known = struck or max((rank.stopped_s for rank in self._ranks), default=0.0)
        return bool(known) and time.monotonic() > known + 0.1 and not any(rank.ended for rank in self._ranks)

    def look(self) -> Result | None:
        """Continue the trial; return its result if it has ended."""
        self._collect()
        alive = [rank for rank in self._ranks if rank.ended is None]
        self._strike_from_outside()
        self._go_on_with_stopped()
        if alive and time.monotonic() > self._begun_s + self.plan.timeout_s + _HANG_S:
            self._kill_hung()
        if any(rank.ended is None for rank in self._ranks):
            return None
        return self._result()

    def _fork(self, rank: int, job: str, make_trainer: MakeTrainer) -> _Rank:
        log = self._folder / f"rank-{rank}.log"
        pid = os.fork()
        if pid:
            return _Rank(pid, log)
        try:
            _set_up(log, self._folder / "tmp")
            striker = Striker(self.plan.fault, rank, self._board)
            trainer = make_trainer(self.plan, rank, job, self._folder, striker)
            end_fork(self.plan, rank, self._board, trainer, striker)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(71)

    def _collect(self) -> None:
        for number, rank in enumerate(self._ranks):
            if rank.ended is not None:
                continue
            pid, status = os.waitpid(rank.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                rank.is_stopped, rank.stopped_s = True, time.monotonic()
            elif pid:
                how = "stopped" if rank.is_stopped and not rank.was_continued else ""
                report = self._board.report(number)
                rank.ended = Ended(os.waitstatus_to_exitcode(status), report, how, _tail(rank.log))

    def _strike_from_outside(self) -> None:
        if self._striking.is_due(self._board):
            victim = self._ranks[self.plan.fault.rank]
            if victim.ended is None:
                self._board.note_strike(self.plan.fault.rank, time.monotonic())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal_of(self.plan.fault))

    def _go_on_with_stopped(self) -> None:
        """Continue or kill a rank that the fault has stopped, when its time has come."""
        for rank in self._ranks:
            if not rank.is_stopped or rank.ended is not None:
                continue
            name = self.plan.fault.kind.name
            others_ended = all(other.ended is not None for other in self._ranks if other is not rank)
            if name == "SIGSTOP and SIGCONT":
                if time.monotonic() > rank.stopped_s + _PAUSE_S * self.plan.fault.amount:
                    self._continue(rank)
            elif others_ended and name == "SIGSTOP, SIGCONT too late":
                self._continue(rank)
            elif others_ended:
                os.kill(rank.pid, signal.SIGKILL)
        if self.plan.fault.kind.name == "stuck":
            stuck = self._ranks[self.plan.fault.rank]
            others = [rank for rank in self._ranks if rank is not stuck]
            if stuck.ended is None and all(rank.ended is not None for rank in others):
                os.kill(stuck.pid, signal.SIGKILL)

    def _continue(self, rank: _Rank) -> None:
        rank.is_stopped, rank.was_continued = False, True
        os.kill(rank.pid, signal.SIGCONT)

    def _kill_hung(self) -> None:
        late = [rank for rank in self._ranks if rank.ended is None]
        for rank in late:
            if not rank.is_stopped:
                os.kill(rank.pid, STACKS_SIGNAL)
        time.sleep(0.5)  # for the stacks to be written; only a report depends on it
        for rank in late:
            os.kill(rank.pid, signal.SIGKILL)
            _, status = os.waitpid(rank.pid, 0)
            rank.ended = Ended(os.waitstatus_to_exitcode(status), None, "hung", _tail(rank.log))

    def _result(self) -> Result:
        ranks = tuple(rank.ended for rank in self._ranks if rank.ended is not None)
        fault = self.plan.fault
        struck_s = max(map(self._board.struck_at_s, fault.struck))
        victim = self._ranks[fault.rank]
        was_struck = bool(struck_s) or (
            fault.place.startswith("core")
            and (
                victim.stopped_s > 0
                or ranks[fault.rank].status < 0
                or "injected" in getattr(ranks[fault.rank].report, "text", "")
            )
        )
        if fault.place.startswith("core"):
            struck_s = victim.stopped_s
        if (
            (report := ranks[fault.rank].report) is not None
            and report.how == "done"
            and report.at_s < struck_s
        ):
            was_struck = False
        last = progress.STEP_0 + self.plan.job.steps_of(fault.rank) - 1
        was_last = self._board.progress(fault.rank) >= last
        pids = [rank.pid for rank in self._ranks]
        left = [f"process {pid}" for found in left_running(pids).values() for pid in found]
        left += left_names(self._shm_before)
        left += [f"$TMPDIR/{name}" for name in left_in_folder(self._folder / "tmp")]
        took_s = time.monotonic() - self._begun_s
        self._board.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return Result(self.plan, ranks, struck_s, was_struck, was_last, tuple(left), took_s)


def left_names(before: frozenset[str]) -> list[str]:
    """Names in /dev/shm that are new, that no process holds, and that a job may have made."""
    return [f"/dev/shm/{name}" for name in left_in_shm(before)]


@dataclass
class Outside:
    """When a fault from outside is due: some time after its rank has begun the step."""

    fault: Fault
    _since_s: float = field(default=0.0)
    _is_over: bool = False

    def is_due(self, board: Board) -> bool:
        """True exactly once, when the fault is due."""
        if self._is_over or not self.fault.place.startswith("outside"):
            return False
        if self.fault.place == "outside wrapping":
            wanted = progress.WRAPPING
        else:
            wanted = progress.STEP_0 + max(self.fault.step, 0)
        if not self._since_s and board.progress(self.fault.rank) >= wanted:
            self._since_s = time.monotonic()
        if not self._since_s or time.monotonic() < self._since_s + _LARGEST_DELAY_S * self.fault.amount:
            return False
        self._is_over = True
        return True


def _set_up(log: Path, temporary: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(_lifeline[1])
    die_with(_lifeline[0])
    # A crash must not dump the core of the whole interpreter.
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")[-6000:]
    return ""
