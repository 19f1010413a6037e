"""Pairs of faults, ordered by state instead of time.

Rank i waits at A until rank r has passed B, and then dies, is stopped and continued, or simply continues.
Each rank counts in shared memory which labelled points it has passed (`count_passages` in cpp/core/faults.h),
and the struck rank reads its peer's count. So each case is one interleaving, and not a race against a clock.
If the peer cannot reach B before the struck rank continues, no rank makes progress; the struck rank notices
this standstill and continues.

These rules must hold, wherever the fault strikes:

- All survivors have made the same number of good steps, and so has a rank that was stopped and continued: a
  backward was good for all ranks or for none. (A collective may return on one rank and raise on another: only
  there may the numbers differ, by one.)
- No byte of a survivor's memory changes after the survivor has raised, whatever the continued rank does.
- Without a death or a stop, every step is good, and every mean and message is right.

This file defines a case and judges it; `pair_driver.py` and `pair_rank.py` run it, `pair_programs.py` has the
programs of the ranks, and `pair_parts.py` lists all cases.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paceline import _core
from tests.fault.faults import Action, Point

Array = np.ndarray[Any, Any]

WORLD_SIZE = 3
STRUCK_IN_STEP = 1
_STEPS = 4
# Any rank may claim a chunk: it may take some backwards until the struck rank does.
_MOST_STEPS = 40


class Program(ABC):
    """The program of one rank, in steps.

    Attributes:
        points: All labelled points that its steps pass.
        most_apart: By how many good steps survivors may differ.
    """

    points: ClassVar[tuple[Point, ...]]
    most_apart: ClassVar[int] = 0

    @abstractmethod
    def __init__(self, group: Any) -> None: ...

    @abstractmethod
    def step(self, number: int) -> None:
        """Make a step, and check its results; raises if it was not good."""

    @abstractmethod
    def memory(self) -> Iterable[Array]:
        """The memory of this rank that no other rank may change once a step has raised."""


@dataclass(frozen=True)
class Strike:
    """`rank` comes to `at`, waits until `peer` has passed `peer_at` (None: does not wait); `action`."""

    action: Action
    rank: int
    at: Point
    peer: int | None = None
    peer_at: Point = Point.CALL_BEGIN

    def __str__(self) -> str:
        text = f"{self.action.name.lower()} rank {self.rank} at {self.at.name.lower()}"
        if self.peer is None:
            return text
        return f"{text} when rank {self.peer} has passed {self.peer_at.name.lower()}"

    def arm(self) -> None:
        """Arm the strike on the struck rank: from now on it can happen."""
        peer = -1 if self.peer is None else self.peer
        _core.arm_fault(self.at, self.action, 1, peer, self.peer_at)


@dataclass(frozen=True)
class Pair:
    """Three ranks run a program, and one or two of them are struck."""

    program: type[Program]
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        return f"{self.program.__name__}: {' and '.join(map(str, self.strikes))}"

    def struck(self, action: Action) -> set[int]:
        return {strike.rank for strike in self.strikes if strike.action is action}

    @property
    def steps(self) -> int:
        """The number of steps that a rank makes without a fault."""
        return _MOST_STEPS if self.struck(Action.KILL) or self.struck(Action.STOP) else _STEPS


@dataclass(frozen=True)
class CaseReport:
    """The report of one rank: sent once when its steps have ended and once when the others' have, too."""

    good_steps: int
    error: str  # empty: none
    digest: str  # of its memory
    is_expected: bool  # True if it ended without an error, or with one of Paceline's
    passed: frozenset[Point] = frozenset()  # from the step on in which faults strike
    was_struck: bool = False  # True if it passed the point of its strike


@dataclass(frozen=True)
class Ended:
    """The driver's view of a rank: without reports, it ended without a word."""

    first: CaseReport | None
    last: CaseReport | None
    was_killed: bool = False


def every_pair(program: type[Program], action: Action) -> list[Pair]:
    """Every point of every rank with every point of every other rank."""
    return [
        Pair(program, (Strike(action, rank, at, peer, peer_at),))
        for rank, peer in itertools.permutations(range(WORLD_SIZE), 2)
        for at in program.points
        for peer_at in program.points
    ]


def every_stop_with_a_death(program: type[Program]) -> list[Pair]:
    """One rank stops at a point, then another dies at one; the first continues when the third has raised."""
    return [
        Pair(program, (Strike(Action.STOP, first, at), Strike(Action.KILL, second, dies_at, first, at)))
        for first, second in itertools.permutations(range(WORLD_SIZE), 2)
        for at in program.points
        for dies_at in program.points
    ]


def judge(pair: Pair, ended: Sequence[Ended]) -> str:
    """The error in how the ranks ended; empty: none."""
    reports = {}
    for rank, each in enumerate(ended):
        if each.was_killed and rank in pair.struck(Action.KILL):
            continue
        if each.first is None or each.last is None:
            return f"rank {rank} ended without a word, or hung"
        if not each.first.is_expected:
            return f"rank {rank} ended with {each.first.error}"
        if each.first.digest != each.last.digest:
            return f"the memory of rank {rank} changed after it had ended with {each.first.error!r}"
        reports[rank] = each.first
    counts = {rank: each.good_steps for rank, each in reports.items()}
    if counts and max(counts.values()) - min(counts.values()) > pair.program.most_apart:
        errors = {rank: each.error.partition("\n")[0] for rank, each in reports.items()}
        return f"good steps by rank: {counts}; errors: {errors}"
    if pair.steps == _STEPS and set(counts.values()) != {pair.steps}:
        return f"a step failed although no rank died: {[each.error for each in reports.values()]}"
    return ""


def has_struck(strikes: Sequence[Strike], ended: Sequence[Ended]) -> bool:
    """True if all of these happened."""

    def has_happened(strike: Strike) -> bool:
        seen = ended[strike.rank]
        return seen.was_killed or (seen.first is not None and seen.first.was_struck)

    return all(has_happened(strike) for strike in strikes)
