"""The backward of a forward in no_sync(), of which nobody but a recording takes notice."""

from __future__ import annotations

import functools

from paceline.reducer.backward.graphs import EndOfBackward
from paceline.trace.recording import recording
from paceline.trace.records import Event

_BEGAN, _ENDED = int(Event.LOCAL_BACKWARD_BEGAN), int(Event.LOCAL_BACKWARD_ENDED)


class LocalBackward:
    """Notes when the backward of one forward begins and ends.

    Args:
        identity: The backward that its gradients will be averaged in.
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
