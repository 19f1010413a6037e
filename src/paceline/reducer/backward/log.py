"""What one model's backward passes leave in the recording and in the totals of the job. The core notes the
moments of each backward (`records`), because nothing there may cost a call in Python.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, final

from paceline import _core
from paceline.health import lifetime
from paceline.reducer.backward.state import EndOfBackward
from paceline.reducer.communicator import Communicator
from paceline.reducer.plan import Plan
from paceline.reducer.protocol import BackwardResult, BackwardTimes
from paceline.trace.batches import samples_in
from paceline.trace.recording import recording
from paceline.trace.records import Event, backward_id, float_bits
from paceline.trace.totals import ModelTotals

_NORM, _NONFINITE = int(Event.NORM), int(Event.NONFINITE)
_BEGAN, _ENDED = int(Event.LOCAL_BACKWARD_BEGAN), int(Event.LOCAL_BACKWARD_ENDED)


@final
class BackwardLog:
    """The recording, as the backward passes of one model write to it.

    Attributes:
        records: Notes the moments of each backward. Ask `recording.note` first.
        totals: What the model adds to the totals of the process.
        before_first: The backward that ends next has the number after this one.
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
            lifetime.at_failure(recording.note_failure)
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
        """Write what is recorded once a second."""
        has_norm = recording.sample(now_ns, number) and squared_norm is not None
        if has_norm and squared_norm is not None and (note := recording.note) is not None:
            note(_NORM, number, float_bits(math.sqrt(squared_norm())))

    def close(self) -> None:
        recording.forget(self._model)


class LocalBackward:
    """Notes when the backward of one forward in no_sync() begins and ends; nothing else takes
    notice of it.
    """

    __slots__ = ("_identity", "_is_open")

    def __init__(self, identity: int) -> None:
        self._identity = identity
        self._is_open = False

    def begin(self) -> EndOfBackward | None:
        """An output has got its gradient; returns what the framework is to call when the backward is over.

        None: it has begun before, or nothing is recorded any more.
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
