"""The promise of static_graph=True: in every pass the same parameters are unused. Imports its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.reducer.protocol import Reducer
from paceline.reducer.report import graph_changed_error


class StaticGraph:
    """What was unused in the first pass, by rank.

    Args:
        names: Of the parameters, by index in the plan.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._first: dict[int, list[int]] = {}

    def check(self, reducer: Reducer, active: Sequence[int]) -> None:
        """Compare the pass that is over with the first one. The same on all ranks.

        Args:
            reducer: Knows what was unused.
            active: Ranks that had data; of others everything is unused.

        A parameter that is used for the first time is no alarm: a gradient of zeros, left by
        zero_grad(set_to_none=False) where another rank used the parameter, counts as one.

        Raises:
            GraphChangedError: A parameter is unused that was used; names what has changed.
        """
        now = {rank: reducer.unused(rank) for rank in active}
        for rank in active:
            self._first.setdefault(rank, now[rank])
        if any(set(now[rank]) - set(self._first[rank]) for rank in active):
            raise graph_changed_error(self._first, now, self._names)
