"""Totals of what a rank has done and used since it began, and their layout in its file.

A rank writes its totals once a second, so a monitor reads a few hundred bytes for each rank, however long the
ring and the job are. A total that the machine or the program does not provide is NaN in the file. This module
imports only the standard library, because launchers read totals and start without the core.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from paceline._core import BackwardRecords, BackwardTimes


class Total(IntEnum):
    """A total, summed over all models of a process and all their steps except the first ones."""

    TIME_NS = 0
    """When the totals were taken, by CLOCK_MONOTONIC."""
    BACKWARDS = 1
    WORKED_NS = 2
    """From the end of each backward to the end of the next backward, without waiting for other ranks."""
    TIMES_LAST = 3
    """Number of backward passes in which this rank arrived last."""
    HELD_UP_NS = 4
    """How much later than the others it arrived in these, averaged over the other ranks."""
    BETWEEN_NS = 5
    """From the end of each backward to the next forward: optimizer, data loading, the rest of the script."""
    DATA_NS = 6
    """Time in the data loader. Like OPTIMIZER_NS it is known only if everything is recorded (--trace)."""
    OPTIMIZER_NS = 7
    WEIGHT = 8
    """The weights of the backward passes, if the user gives any."""
    SAMPLES = 9
    """First dimensions of the batches that the model was called with."""
    CPU_NS = 10
    """Processor time of all threads."""
    RUN_QUEUE_NS = 11
    """How long the main thread was ready to run while another thread had its core."""
    SWITCHES = 12
    """Number of involuntary context switches."""
    MAJOR_FAULTS = 13
    """Pages that were read from a disk."""
    MINOR_FAULTS = 14
    """Pages that the kernel mapped without reading a disk."""
    THROTTLED_NS = 15
    """How long the control group was throttled."""
    STOLEN_NS = 16
    """How long other virtual machines had the cores of this process, summed over cores."""
    LONGEST_HELD_UP_NS = 17
    """How much later than the others this rank arrived in the backward for which that was most. Not a sum."""


Totals: TypeAlias = Mapping[Total, float]
"""Totals of one rank. A total that is not known has no entry."""

# The sequence number stands before and after the values, so that a reader notices a half-written table.
_TABLE = struct.Struct(f"<Q{len(Total)}dQ")
TABLE_BYTES = _TABLE.size


def pack_totals(number: int, totals: Totals) -> bytes:
    return _TABLE.pack(number, *(totals.get(total, math.nan) for total in Total), number)


def unpack_totals(table: bytes) -> Totals:
    first, *values, last = _TABLE.unpack(table)
    if first != last or not first:
        return {}
    found = {total: value for total, value in zip(Total, values) if not math.isnan(value)}
    if any(map(math.isinf, found.values())):
        raise ValueError("it holds totals that no rank has written")
    return found


def sum_of(parts: Iterable[Totals]) -> dict[Total, float]:
    found: dict[Total, float] = {}
    for part in parts:
        for total, value in part.items():
            if total is Total.LONGEST_HELD_UP_NS:
                found[total] = max(found.get(total, 0.0), value)
            else:
                found[total] = found.get(total, 0.0) + value
    return found


class ModelTotals:
    """What one wrapped model adds to the totals of its process.

    Attributes:
        weight: The total `WEIGHT` of this model; None: no weight was ever given.
    """

    __slots__ = ("_last", "_longest_ns", "_rank", "_records", "_times", "weight")

    def __init__(
        self,
        rank: int,
        times: Callable[[], BackwardTimes],
        records: BackwardRecords,
    ) -> None:
        self._records = records
        self.weight: float | None = None
        self._rank = rank
        # Weak, so that the recording does not keep a model alive.
        self._times: weakref.WeakMethod[Any] = weakref.WeakMethod(times)
        self._last: Totals = {}
        self._longest_ns = 0.0

    def read(self) -> Totals:
        of_model = self._times()
        if of_model is None:
            return self._last
        times: BackwardTimes = of_model()
        # The core keeps the latest 64 backward passes. Totals are read at the end of each pass that took a
        # second, so a long wait is not missed.
        self._longest_ns = max(self._longest_ns, _longest_lateness_ns(times.recent_ns, self._rank))
        found: dict[Total, float] = {
            Total.BACKWARDS: times.backwards,
            Total.WORKED_NS: times.worked_ns[self._rank],
            Total.TIMES_LAST: times.times_last[self._rank],
            Total.HELD_UP_NS: times.held_up_ns[self._rank],
            Total.LONGEST_HELD_UP_NS: self._longest_ns,
            Total.BETWEEN_NS: self._records.between_ns,
        }
        if self._records.samples:
            found[Total.SAMPLES] = self._records.samples
        if self.weight is not None:
            found[Total.WEIGHT] = self.weight
        self._last = found
        return found


def _longest_lateness_ns(worked_ns: Sequence[Sequence[int]], rank: int) -> float:
    """How much longer than the mean of the others a rank has worked, in the backward for which that was most.

    Args:
        worked_ns: For each rank, how long it has worked for each of the same backward passes.
        rank: The rank.
    """
    others = len(worked_ns) - 1
    if not others:
        return 0.0
    passes = zip(*worked_ns)
    return max((each[rank] - (sum(each) - each[rank]) / others for each in passes), default=0.0)
