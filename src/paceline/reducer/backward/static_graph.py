"""The check of static_graph=True, which promises that every backward uses the same parameters.

Only a rank itself knows whether it used a parameter, because a gradient that is left from before (zeros,
after zero_grad(set_to_none=False)) is averaged like any other. So each rank compares its backward with its
first one, and reports a difference in place of its counts of forwards. Then all ranks exchange the details.

`GraphVariety` tracks whether the graph is static without that promise.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence

from paceline.errors import GraphChangedError
from paceline.reducer.backward_errors import name_rows, ranks_by_index
from paceline.reducer.reducer_interface import BackwardStatus


class StaticGraph:
    """Compares the parameters that this rank used in its first good backward with those of later ones."""

    def __init__(self, names: Sequence[str], all_gather: Callable[[bytes], list[bytes]]) -> None:
        self._names = names
        self._all_gather = all_gather
        self._first: frozenset[int] | None = None
        self._now: frozenset[int] | None = None

    def has_changed(self, used: Collection[int]) -> bool:
        """Whether this rank's backward used other parameters than its first one."""
        self._now = frozenset(used)
        return self._first is not None and self._now != self._first

    def end_good(self) -> None:
        if self._first is None:
            self._first = self._now

    def check(self, statuses: Sequence[BackwardStatus]) -> None:
        """Raise if the graph of some rank has changed. The same on all ranks, and collective if so."""
        reported = [rank for rank, status in enumerate(statuses) if status.graph_changed]
        if not reported:
            return
        lost: Sequence[int] = ()
        gained: Sequence[int] = ()
        if self._first is not None and self._now is not None:  # not so if this rank has had no data yet
            lost, gained = sorted(self._first - self._now), sorted(self._now - self._first)
        payloads = self._all_gather(array("q", [len(lost), *lost, *gained]).tobytes())
        rows = {rank: array("q", payloads[rank]).tolist() for rank in reported}
        lost_by_rank = {rank: row[1 : 1 + row[0]] for rank, row in rows.items()}
        gained_by_rank = {rank: row[1 + row[0] :] for rank, row in rows.items()}
        raise graph_changed_error(lost_by_rank, gained_by_rank, self._names)


class GraphVariety:
    """Tracks whether the graph has been static so far on this rank.

    Only backward passes in which something was unused are noted.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._used: frozenset[int] | None = None
        self._num_backwards = 0
        self._has_varied = False

    def note(self, used: Callable[[], Collection[int]]) -> None:
        if self._has_varied:
            return
        now = frozenset(used())
        if len(now) == self._num_parameters:  # all were used, if those of earlier micro-batches are counted
            return
        self._num_backwards += 1
        self._has_varied = self._used is not None and now != self._used
        self._used = now

    def is_static(self, num_backwards: int) -> bool:
        return not self._has_varied and self._num_backwards in (0, num_backwards)


def graph_changed_error(
    lost_by_rank: Mapping[int, Sequence[int]],
    gained_by_rank: Mapping[int, Sequence[int]],
    names: Sequence[str],
) -> GraphChangedError:
    """For parameters used differently than in the first backward, although static_graph=True was promised."""
    lost, gained = ranks_by_index(lost_by_rank.items()), ranks_by_index(gained_by_rank.items())
    rows = [("no gradient any more", lost), ("no gradient in the first backward", gained)]
    return GraphChangedError(
        "The graph changed, although static_graph=True promised that it would not.",
        where="the end of backward; the gradients of this backward are not to be used, on any rank",
        seen="\n".join(f"{what}, {name_rows(ranks_of, names)}" for what, ranks_of in rows if ranks_of),
        likely="a branch in forward that some steps take and others don't",
        hint="pass find_unused_parameters=True instead of static_graph=True",
        changed=tuple(names[index] for index in sorted({*lost, *gained})),
    )
