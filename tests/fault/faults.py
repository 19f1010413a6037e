"""One line names a fault: `faults.kill(rank=2, step=3, at=Point.AFTER_POST)`.

A fault strikes inside the core, at a labelled step of its protocol (cpp/core/faults.h), so it does not depend
on timing. Every rank calls `arm` before every step of its program.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from paceline import _core

# Steps of the protocol, with their names from cpp/core/faults.h: Point.AFTER_POST and so on.
Point = IntEnum("Point", [name.upper() for name in _core.fault_points()], start=0)

# The kind of call that passes the point.
ARRIVAL = (Point.CALL_BEGIN, Point.BEFORE_ARRIVE, Point.AFTER_ARRIVE)
REDUCTION = (Point.BEFORE_REDUCE, Point.AFTER_REDUCE)
BACKWARD = tuple(point for point in Point if Point.MARK_READY <= point <= Point.AFTER_END)
OPTIMIZER_STEP = tuple(point for point in Point if Point.STEP_MET <= point <= Point.STEP_DONE)


class Action(IntEnum):
    """The action at the point."""

    KILL = _core.FAULT_ACTIONS["kill"]
    STOP = _core.FAULT_ACTIONS["stop"]
    SEGFAULT = _core.FAULT_ACTIONS["segfault"]
    RAISE = _core.FAULT_ACTIONS["raise"]
    HOLD = _core.FAULT_ACTIONS["hold"]  # nothing: for a fault that waits for another rank first


@dataclass(frozen=True)
class Fault:
    """In step `step` of its program, or at its next passage of `at`, `rank` does `action`.

    `nth`: not at the first passage but at this one.
    """

    rank: int
    action: Action
    at: Point
    step: int = 1
    nth: int = 1

    def __str__(self) -> str:
        nth = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.action.name.lower()} rank {self.rank} at {self.at.name.lower()}{nth}"

    def arm(self, rank: int, step: int) -> None:
        """Arm the fault if this is its rank and step."""
        if (rank, step) == (self.rank, self.step):
            _core.arm_fault(self.at, self.action, self.nth)


def kill(rank: int, at: Point, step: int = 1, nth: int = 1) -> Fault:
    """SIGKILL, as the kernel's out-of-memory killer sends it."""
    return Fault(rank, Action.KILL, at, step, nth)


def stop(rank: int, at: Point, step: int = 1, nth: int = 1) -> Fault:
    """SIGSTOP: the rank is alive, and does nothing any more."""
    return Fault(rank, Action.STOP, at, step, nth)


def segfault(rank: int, at: Point, step: int = 1, nth: int = 1) -> Fault:
    """SIGSEGV."""
    return Fault(rank, Action.SEGFAULT, at, step, nth)


def raise_error(rank: int, at: Point, step: int = 1, nth: int = 1) -> Fault:
    """An exception, which ends the rank's program."""
    return Fault(rank, Action.RAISE, at, step, nth)
