"""What a rank has used and done since it began, in numbers that only grow; and how they lie in its file.

A rank writes its totals once in a second, so a monitor reads some hundred bytes for
each rank, whatever the length of its ring and of the job. What a machine or a program does not say is NaN.
Imports the standard library: launchers read totals, and start without the core.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from paceline._core import BackwardRecords, BackwardTimes


class Total(IntEnum):
    """What is counted. Sums over all models of a process and all their steps, but for the first ones."""

    TIME_NS = 0
    """When it was looked at, by CLOCK_MONOTONIC."""
    BACKWARDS = 1
    WORKED_NS = 2
    """From the end of each backward to the end of the next backward, without waiting for others."""
    TIMES_LAST = 3
    """In how many backward passes this rank was the last to come."""
    HELD_UP_NS = 4
    """How much later than the others it came then, in the mean over these."""
    BETWEEN_NS = 5
    """From the end of each backward to the next forward: optimizer, data, whatever the script does."""
    DATA_NS = 6
    """Within the data loader. Told only where all is recorded, as all in the next line."""
    OPTIMIZER_NS = 7
    WEIGHT = 8
    """The weights of the backward passes, where the user gives any."""
    SAMPLES = 9
    """First dimensions of what the model was called with."""
    CPU_NS = 10
    """Processor time of all threads."""
    RUN_QUEUE_NS = 11
    """How long the main thread was ready to run while another one had the core."""
    SWITCHES = 12
    """How often a thread was taken from its core."""
    MAJOR_FAULTS = 13
    """Pages that were read from a disk."""
    MINOR_FAULTS = 14
    """Pages that the kernel had to give."""
    THROTTLED_NS = 15
    """How long the control group was throttled."""
    STOLEN_NS = 16
    """How long the process's cores were taken by other virtual machines, in all."""


Totals: TypeAlias = Mapping[Total, float]
"""What is told; what is not told is not in it."""

# A number that is counted up before and after, so that a reader sees when it has read half of a change.
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
            found[total] = found.get(total, 0.0) + value
    return found


class ModelTotals:
    """What one wrapped model adds to the totals of its process.

    Attributes:
        weight: As the total of this name; None: no weight was ever given.
    """

    __slots__ = ("_last", "_rank", "_records", "_times", "weight")

    def __init__(
        self,
        rank: int,
        times: Callable[[], BackwardTimes],
        records: BackwardRecords,
    ) -> None:
        self._records = records
        self.weight: float | None = None
        self._rank = rank
        # Weak: a model that nobody holds any more need not wait for the recording to forget it.
        self._times: weakref.WeakMethod[Any] = weakref.WeakMethod(times)
        self._last: Totals = {}

    def read(self) -> Totals:
        of_model = self._times()
        if of_model is None:
            return self._last
        times: BackwardTimes = of_model()
        found: dict[Total, float] = {
            Total.BACKWARDS: times.backwards,
            Total.WORKED_NS: times.worked_ns[self._rank],
            Total.TIMES_LAST: times.times_last[self._rank],
            Total.HELD_UP_NS: times.held_up_ns[self._rank],
            Total.BETWEEN_NS: self._records.between_ns,
        }
        if self._records.samples:
            found[Total.SAMPLES] = self._records.samples
        if self.weight is not None:
            found[Total.WEIGHT] = self.weight
        self._last = found
        return found
