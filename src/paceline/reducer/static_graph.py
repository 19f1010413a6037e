"""The promise of static_graph=True: in every pass the same parameters are unused.

Imports only `errors` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ModelMismatchError, format_ranks
from paceline.reducer.protocol import STATIC, TWICE, Reducer
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


def without_promises(forwards_by_rank: Sequence[int]) -> list[int]:
    """The numbers of forwards alone, of ranks that may have promised a static graph after wrapping.

    Raises:
        ModelMismatchError: Some have, and others have not.
    """
    counting = [rank for rank, count in enumerate(forwards_by_rank) if count < TWICE]
    promised = [rank for rank in counting if forwards_by_rank[rank] >= STATIC]
    others = [rank for rank in counting if rank not in promised]
    if promised and others:
        raise ModelMismatchError(
            "The ranks train with different arguments: static_graph differs.",
            where="the end of backward; the gradients of this pass are of no use, on any rank",
            seen=f"{format_ranks(promised)}: static_graph=True\n{format_ranks(others)}: static_graph=False",
            likely="_set_static_graph() was called on some ranks only",
            hint="call it on every rank, before the first backward; or pass static_graph=True when wrapping",
            parameter="static_graph",
        )
    return [count - STATIC if rank in promised else count for rank, count in enumerate(forwards_by_rank)]
