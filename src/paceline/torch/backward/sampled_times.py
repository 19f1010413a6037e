"""Times some backwards for `_get_ddp_logging_data`, and marks the end of a backward for torch's profiler.

The function that autograd calls at the end of a backward is wrapped only if that backward is timed or
profiled. Other backwards pay nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.autograd.profiler import record_function

if TYPE_CHECKING:
    from paceline.reducer.reducer_interface import Reducer

_FIRST_BACKWARDS = 10  # as torch: the first ones are timed, and then one in _SAMPLE_RATE
_SAMPLE_RATE = 100

PHASES = ("forward_compute", "backward_compute", "backward_comm", "backward_compute_comm_overlap")
"""The phases that are timed, with torch's names: from forward until backward begins; from there until all
gradients are computed; from the first complete bucket until all means and buffers are in place; and the time
for which the last two overlap."""


def profiled(end: Callable[[], None]) -> Callable[[], None]:
    """Show the end of a backward in torch's profilers: waiting for other ranks, and averaging."""

    def call() -> None:
        with record_function("paceline::average"):
            end()

    return call


class SampledTimes:
    """The times of some backwards of one wrapped model.

    Attributes:
        next_backward: The number of good backwards before the next one to be timed.
        is_begun: Whether the forward of a timed backward has begun, and its backward has not.
        backward_number: The number of good backwards before the last one that was timed; 0: none was timed.
            The first backward is never timed: memory and buckets settle in it.
    """

    def __init__(self, *, is_timing: bool) -> None:
        self.next_backward: float = 1 if is_timing else math.inf
        self.is_begun = False
        self.backward_number = 0
        self._rate = _SAMPLE_RATE
        self._count = 0
        self._last = dict.fromkeys(PHASES, 0)
        self._average = dict.fromkeys(PHASES, 0.0)
        self._clock: dict[str, int] = {}

    def use_rate(self, rate: int, good_backwards: int) -> None:
        self._rate = rate
        if self.next_backward != math.inf:
            self.next_backward = self._after(good_backwards - 1)

    def begin_forward(self, good_backwards: int) -> None:
        """Start the times of a backward at its forward; of several forwards the last one counts."""
        self.is_begun = True
        self._number = good_backwards
        self._forward_ns = time.monotonic_ns()

    def timed(self, end: Callable[[], None], reducer: Reducer) -> Callable[[], None]:
        self.is_begun = False
        begun_ns = time.monotonic_ns()

        def call() -> None:
            computed_ns = time.monotonic_ns()
            end()
            launched_ns = 0 if reducer.last is None else reducer.last.first_bucket_ns
            self._add(begun_ns, computed_ns, launched_ns or computed_ns, time.monotonic_ns())

        return call

    def facts(self) -> dict[str, int]:
        """Times in nanoseconds, under torch's names; names in _start or _end are times since 1970."""
        if not self._count:
            return {}
        facts = {f"{phase}_time": value for phase, value in self._last.items()}
        facts |= {f"avg_{phase}_time": round(value) for phase, value in self._average.items()}
        return facts | self._clock

    def _add(self, begun_ns: int, computed_ns: int, launched_ns: int, ended_ns: int) -> None:
        launched_ns = min(max(launched_ns, begun_ns), computed_ns)
        took = (
            begun_ns - self._forward_ns,
            computed_ns - begun_ns,
            ended_ns - launched_ns,
            computed_ns - launched_ns,
        )
        self._last = dict(zip(PHASES, took))
        self._count += 1
        for phase, value in self._last.items():
            self._average[phase] += (value - self._average[phase]) / self._count
        since_1970_ns = time.time_ns() - time.monotonic_ns()
        marks = {
            "forward_compute_time_start": self._forward_ns,
            "backward_compute_time_start": begun_ns,
            "backward_compute_time_end": computed_ns,
            "backward_comm_time_start": launched_ns,
            "backward_comm_time_end": ended_ns,
        }
        self._clock = {name: mark + since_1970_ns for name, mark in marks.items()}
        self.backward_number = self._number
        self.next_backward = self._after(self._number)

    def _after(self, number: int) -> int:
        if number + 1 < _FIRST_BACKWARDS:
            return max(1, number + 1)
        return (number // self._rate + 1) * self._rate
