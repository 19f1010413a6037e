"""What one model's backward passes write to the recording and to the totals of the job.

The core records the moments of each backward (`records`), because a call in Python would cost too much there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

from paceline import _core
from paceline.health import exit_reports
from paceline.reducer.backward.state import EndOfBackward
from paceline.reducer.communicator import Communicator
from paceline.reducer.plan import Plan
from paceline.reducer.reducer_interface import BackwardResult, BackwardTimes
from paceline.trace.batch_size import samples_in
from paceline.trace.recording import recording
from paceline.trace.records import Event, backward_id, float_bits
from paceline.trace.totals import ModelTotals

_NORM, _NONFINITE = int(Event.NORM), int(Event.NONFINITE)
_BEGAN, _ENDED = int(Event.LOCAL_BACKWARD_BEGAN), int(Event.LOCAL_BACKWARD_ENDED)


@final
class BackwardLog:
    """Writes the backward passes of one model to the recording.

    Attributes:
        records: Records the moments of each backward. Check `recording.note` first.
        totals: What the model adds to the totals of the process.
        before_first: The number before that of the model's first backward.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        names: Sequence[str],
        times: Callable[[], BackwardTimes],
    ) -> None:
        self._rank, self._world_size, self._names = rank, world_size, names
        self.records = _core.BackwardRecords(samples_in)
        self.totals = ModelTotals(rank, times, self.records)
        recording.begin_if_asked(rank, world_size)
        if recording.note is not None:
            exit_reports.at_failure(recording.note_failure)
        self._model = recording.number_model(self.totals)
        self.before_first = backward_id(self._model, 0)

    def record_plan(self, communicator: Communicator[Any], plan: Plan) -> None:
        recording.note_facts(
            "model", self._model, rank=self._rank, world_size=self._world_size, path=communicator.path
        )
        buckets = []
        for bucket in plan.buckets:
            first, last = (self._names[bucket.parameters[place]] for place in (0, -1))
            buckets.append([bucket.nbytes, first if first == last else f"{first} ... {last}"])
        recording.note_facts("buckets", self._model, buckets=buckets)

    def note_nonfinite(self, number: int, result: BackwardResult) -> None:
        if (note := recording.note) is not None and (pairs := result.nonfinite):
            note(_NONFINITE, number, len(pairs) << 32 | min(rank for rank, _ in pairs))

    def sample(self, now_ns: int, number: int, squared_norm: Callable[[], float] | None) -> None:
        """Record the figures that are sampled once a second."""
        has_norm = recording.sample(now_ns, number) and squared_norm is not None
        if has_norm and squared_norm is not None and (note := recording.note) is not None:
            note(_NORM, number, float_bits(math.sqrt(squared_norm())))

    def close(self) -> None:
        recording.forget(self._model)


class LocalBackward:
    """Records the beginning and end of the backward of one forward in no_sync()."""

    __slots__ = ("_identity", "_is_open")

    def __init__(self, identity: int) -> None:
        self._identity = identity
        self._is_open = False

    def begin(self) -> EndOfBackward | None:
        """Note that an output has got its gradient; returns the callback for the end of the backward.

        None if the backward has begun before, or nothing is recorded any more.
        """
        note = recording.note
        if self._is_open or note is None:
            return None
        self._is_open = True
        note(_BEGAN, self._identity, 0)
        return EndOfBackward(functools.partial(self._end, False), functools.partial(self._end, True))

    def _end(self, has_raised: bool) -> None:
        self._is_open = False
        if (note := recording.note) is not None:
            note(_ENDED, self._identity, has_raised)
