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

        Raises:
            GraphChangedError: Other parameters are unused now; names them.
        """
        now = {rank: reducer.unused(rank) for rank in active}
        for rank in active:
            self._first.setdefault(rank, now[rank])
        if any(now[rank] != self._first[rank] for rank in active):
            raise graph_changed_error(self._first, now, self._names)
