"""What the reducers of earlier plans have counted: a plan may change, and nobody's waiting is forgotten.

The one idea: a reducer goes with its plan, so its figures are taken from it before it is closed. Those that
add up are added up; those of its last backward count until the next one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from paceline.reducer.protocol import Reducer
from paceline.reducer.worked_times import Arrivals


@final
class EarlierReducers:
    """The figures of all reducers that one model has had, but for the one in use.

    Args:
        world_size: Number of ranks.

    Attributes:
        last_backward: The squared norm, and (rank, parameter) of each gradient that was not finite, of the
            last backward; None: the reducer in use has averaged a backward, and knows. `BackwardSync` clears
            it at each end.
    """

    def __init__(self, world_size: int) -> None:
        self.last_backward: tuple[float, list[tuple[int, int]]] | None = None
        self._waited_s = 0.0
        self._waited_for_ns = [0] * world_size
        self._arrivals = Arrivals.none(world_size)

    def add(self, reducer: Reducer) -> None:
        """Another reducer takes the place of this one, which is not closed yet."""
        self.last_backward = reducer.squared_norm(), reducer.nonfinite()
        self._waited_s = self.waited_s(reducer)
        self._waited_for_ns = self.waited_for_ns(reducer)
        self._arrivals = self.arrivals(reducer)

    def waited_s(self, now: Reducer) -> float:
        """Seconds that this rank has waited at the end of backward, so far; `now`: the one in use."""
        return self._waited_s + now.waited_s

    def waited_for_ns(self, now: Reducer) -> list[int]:
        """How much of that was for each rank."""
        return [sum(pair) for pair in zip(self._waited_for_ns, now.waited_for_ns, strict=True)]

    def arrivals(self, now: Reducer) -> Arrivals:
        """How the ranks have come to the ends of their backward passes."""
        return self._arrivals.plus(now.arrivals)

    def squared_norm(self, now: Reducer) -> float:
        """The squared norm of the last backward's means."""
        return now.squared_norm() if self.last_backward is None else self.last_backward[0]

    def nonfinite(self, now: Reducer) -> Sequence[tuple[int, int]]:
        """(rank, parameter) of each gradient that was not finite in the last backward."""
        return now.nonfinite() if self.last_backward is None else self.last_backward[1]
