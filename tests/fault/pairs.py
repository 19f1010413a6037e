"""Pairs of faults with state instead of time: rank i waits at A until rank r has passed B, and then dies,
is stopped and continued, or simply goes on.

Each rank counts in shared memory which labelled points it has passed (`count_passages` in cpp/core/faults.h),
and the struck rank looks at its partner's count; so each case is one interleaving, and not a race against a
clock. Where the partner cannot come to B before the struck rank goes on, nobody moves any more; the struck
rank notices this standstill and goes on.

What must hold, wherever the fault strikes:

- All survivors have made the same number of good passes, and so has a rank that was stopped and continued: a
  pass was good for all ranks or for none.
- No byte of a survivor's gradients changes after the survivor has raised, whatever the continued rank does.
- Without a death or a stop, every pass is good, and every mean is right.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
import os
import pickle
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import paceline
from paceline import _core
from paceline.errors import PacelineError
from tests.fault.faults import Action, Point
from tests.harness import run_ranks

Array = np.ndarray[Any, Any]

WORLD_SIZE = 3
_STRUCK_IN_STEP = 1
_STEPS = 4
# Who claims a chunk is nobody's plan: it may take some passes until the struck rank does.
_MOST_STEPS = 40
# A survivor notices a stopped rank when this has passed, so it is most of what a case of STOP costs.
_TIMEOUT_S = 1.0
_PATIENCE_S = 120.0


class Program:
    """What one rank does: `step(n)` makes a pass and raises if it was not good."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def step(self, number: int) -> None:
        raise NotImplementedError

    def gradients(self) -> Iterable[Array]:
        """The memory of this rank that nobody may change once a step has raised."""
        raise NotImplementedError


@dataclass(frozen=True)
class Strike:
    """`rank` comes to `at`, waits until `partner` has passed `partner_at` (None: does not wait); `action`."""

    action: Action
    rank: int
    at: Point
    partner: int | None = None
    partner_at: Point = Point.CALL_BEGIN

    def __str__(self) -> str:
        told = f"{self.action.name.lower()} rank {self.rank} at {self.at.name.lower()}"
        if self.partner is None:
            return told
        return f"{told} when rank {self.partner} has passed {self.partner_at.name.lower()}"

    def arm(self) -> None:
        """On the rank that is struck: from now on it can happen."""
        partner = -1 if self.partner is None else self.partner
        _core.arm_fault(self.at, self.action, 1, partner, self.partner_at)


@dataclass(frozen=True)
class Pair:
    """Three ranks run a program, and one or two of them are struck."""

    program: Callable[[Any], Program]
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        return f"{self.program.__name__}: {' and '.join(map(str, self.strikes))}"

    def struck(self, action: Action) -> set[int]:
        return {strike.rank for strike in self.strikes if strike.action is action}

    @property
    def steps(self) -> int:
        return _STEPS if self.struck(Action.HOLD) else _MOST_STEPS


@dataclass(frozen=True)
class Told:
    """What one rank tells of itself, once when its steps have ended and once when the others' have, too."""

    good_steps: int
    error: str  # empty: none
    digest: str  # of its gradients
    is_expected: bool  # whether it ended as a rank may: without an error, or with one of Paceline's


@dataclass(frozen=True)
class Ended:
    """What the driver saw of a rank: nothing told means that it ended without a word."""

    first: Told | None
    last: Told | None
    was_killed: bool = False


@dataclass(frozen=True)
class Findings:
    """What many cases gave: one line for each that went wrong, and how many strikes did not happen."""

    wrong: list[str]
    unstruck: int


def every_pair(program: Callable[[Any], Program], action: Action, points: Sequence[Point]) -> list[Pair]:
    """Every point of every rank with every point of every other rank."""
    return [
        Pair(program, (Strike(action, rank, at, partner, partner_at),))
        for rank, partner in itertools.permutations(range(WORLD_SIZE), 2)
        for at in points
        for partner_at in points
    ]


def every_stop_with_a_death(program: Callable[[Any], Program], points: Sequence[Point]) -> list[Pair]:
    """One rank stops at a point, then another dies at one; the first goes on when the third has raised."""
    return [
        Pair(program, (Strike(Action.STOP, first, at), Strike(Action.KILL, second, dies_at, first, at)))
        for first, second in itertools.permutations(range(WORLD_SIZE), 2)
        for at in points
        for dies_at in points
    ]


def run_pairs(pairs: Sequence[Pair], at_once: int = 8) -> Findings:
    """Run the cases, several at once.

    Raises:
        RanksFailed: The driver itself failed, or something was left behind.
    """
    kwargs = {"pairs": list(pairs), "at_once": at_once}
    (found,) = run_ranks(_drive, 1, kwargs, group=None, deadline_s=3000.0)
    return Findings(*found)


def judge(pair: Pair, ended: Sequence[Ended]) -> str:
    """What is wrong with how the ranks ended; empty: nothing."""
    told = {}
    for rank, each in enumerate(ended):
        if each.was_killed and rank in pair.struck(Action.KILL):
            continue
        if each.first is None or each.last is None:
            return f"rank {rank} ended without a word, or hung"
        if not each.first.is_expected:
            return f"rank {rank} ended with {each.first.error}"
        if each.first.digest != each.last.digest:
            return f"the gradients of rank {rank} changed after it had ended with {each.first.error!r}"
        told[rank] = each.first
    counts = {rank: each.good_steps for rank, each in told.items()}
    if len(set(counts.values())) > 1:
        errors = {rank: each.error.partition("\n")[0] for rank, each in told.items()}
        return f"good passes by rank: {counts}; errors: {errors}"
    if pair.struck(Action.HOLD) and set(counts.values()) != {pair.steps}:
        return f"a pass failed although nobody died: {[each.error for each in told.values()]}"
    return ""


# --- the driver: a harness rank that is in no group ---


class _Rank:
    """One forked rank, as the driver sees it."""

    def __init__(self, pid: int, reading: int, writing: int) -> None:
        self.pid = pid
        self.status: int | None = None  # once it has ended; negative: the signal
        self.is_stopped = False
        self._reading = reading
        self._writing = writing

    def look(self) -> None:
        """Note whether the process has stopped or ended since."""
        while self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not done:
                return
            self.is_stopped = os.WIFSTOPPED(status)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                self.status = os.waitstatus_to_exitcode(status)

    def has_spoken(self) -> bool:
        """Whether it told something, or has ended."""
        return bool(select.select([self._reading], [], [], 0)[0])

    def hear(self) -> Told | None:
        """What it tells, once it does; None: it has ended, or hangs."""
        if not select.select([self._reading], [], [], _PATIENCE_S)[0]:
            return None
        head = os.read(self._reading, 4)
        if not head:
            return None
        (size,) = struct.unpack("<I", head)
        told: Told = pickle.loads(os.read(self._reading, size))
        return told

    def ask(self) -> None:
        os.write(self._writing, b"?")

    def end(self) -> None:
        os.close(self._writing)
        os.close(self._reading)
        self.look()
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _drive(_: int, pairs: Sequence[Pair], at_once: int) -> tuple[list[str], int]:
    wrong = []
    unstruck = 0
    for begin in range(0, len(pairs), at_once):
        running = [(pair, _start(pair, begin + i)) for i, pair in enumerate(pairs[begin : begin + at_once])]
        for pair, ranks in running:
            ended = _finish(pair, ranks)
            if found := judge(pair, ended):
                wrong.append(f"{pair}: {found}")
            told = [each.first for each in ended if each.first is not None]
            is_unstruck = len(told) == WORLD_SIZE and all(each.good_steps == pair.steps for each in told)
            unstruck += is_unstruck and not pair.struck(Action.HOLD)
    return wrong, unstruck


def _start(pair: Pair, number: int) -> list[_Rank]:
    job_id = f"{os.environ['PACELINE_JOB_ID']}/{number}"
    board = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the forks, zeroed
    ranks: list[_Rank] = []
    for rank in range(WORLD_SIZE):
        from_rank, to_driver = os.pipe()
        from_driver, to_rank = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(from_rank)
            os.close(to_rank)
            _run_rank(pair, rank, job_id, board, from_driver, to_driver)
        os.close(to_driver)
        os.close(from_driver)
        ranks.append(_Rank(pid, from_rank, to_rank))
    board.close()
    return ranks


def _finish(pair: Pair, ranks: Sequence[_Rank]) -> list[Ended]:
    """Hear every rank; continue those that are stopped when the others have told; hear all again."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        for each in ranks:
            each.look()
        if all(each.is_stopped or each.has_spoken() for each in ranks):
            break
        time.sleep(0.001)
    first = {rank: each.hear() for rank, each in enumerate(ranks) if not each.is_stopped}
    for rank, each in enumerate(ranks):
        if each.is_stopped:
            os.kill(each.pid, signal.SIGCONT)
            first[rank] = each.hear()
    last: dict[int, Told | None] = {}
    for rank, told in first.items():
        if told is not None:
            ranks[rank].ask()
            last[rank] = ranks[rank].hear()
    for each in ranks:
        each.end()
    return [
        Ended(first[rank], last.get(rank), each.status == -signal.SIGKILL) for rank, each in enumerate(ranks)
    ]


# --- a rank ---


def _run_rank(pair: Pair, rank: int, job_id: str, board: mmap.mmap, from_driver: int, to_driver: int) -> None:
    """In the forked child; does not return."""
    good = 0
    error = ""
    is_expected = True
    program: Program | None = None
    try:
        # A slow start is no fault, so what comes before the first step has time-outs of its own.
        timeout_s = _TIMEOUT_S if pair.struck(Action.STOP) else 30.0
        group = paceline.init(
            rank=rank, world_size=WORLD_SIZE, job_id=job_id, timeout_s=timeout_s, forming_timeout_s=60
        )
        group.barrier(timeout_s=60)
        program = pair.program(group)
        _core.count_passages(ctypes.addressof(ctypes.c_char.from_buffer(board)), WORLD_SIZE, rank)
        group.barrier(timeout_s=60)
        for number in range(pair.steps):
            for strike in pair.strikes:
                if (rank, number) == (strike.rank, _STRUCK_IN_STEP):
                    strike.arm()
            program.step(number)
            good += 1
    except BaseException as caught:
        is_expected = isinstance(caught, PacelineError)
        error = f"{type(caught).__name__}: {caught}"
        if not is_expected:
            error += "\n" + traceback.format_exc()
    try:
        # The exception is gone by now, as in a script that has caught it and goes on.
        for _ in range(2):
            digest = "" if program is None else _digest(program.gradients())
            told = pickle.dumps(Told(good, error, digest, is_expected))
            os.write(to_driver, struct.pack("<I", len(told)) + told)
            os.read(from_driver, 1)
    finally:
        os._exit(0)


def _digest(arrays: Iterable[Array]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        total.update(np.ascontiguousarray(array))
    return total.hexdigest()
