"""The promise of static_graph=True: in every pass the same parameters are used.

The one idea: whether a parameter was used only its own rank knows, because a gradient that is left from
before (zeros, after zero_grad(set_to_none=False)) is averaged like any other. So each rank compares its pass
with its first one, and says instead of its number of forwards that they differ; then all tell all.

Imports only `errors` and its neighbours.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence

from paceline.errors import ModelMismatchError, format_ranks
from paceline.reducer.protocol import PassStatus
from paceline.reducer.report import graph_changed_error


class StaticGraph:
    """What this rank used in its first good pass, and whether it still does.

    Args:
        names: Of the parameters, by index in the plan.
        all_gather: Payloads of all ranks, by rank. Collective; called only where a promise is broken.
    """

    def __init__(self, names: Sequence[str], all_gather: Callable[[bytes], list[bytes]]) -> None:
        self._names = names
        self._all_gather = all_gather
        self._first: frozenset[int] | None = None
        self._now: frozenset[int] | None = None

    def has_changed(self, used: Collection[int]) -> bool:
        """Whether this pass of this rank used other parameters than the first one.

        Args:
            used: Parameters that got a gradient in it, or in no_sync() since the pass before.
        """
        self._now = frozenset(used)
        return self._first is not None and self._now != self._first

    def end_good(self) -> None:
        """The pass was good on all ranks: if it was the first, it is what is promised."""
        if self._first is None:
            self._first = self._now

    def check(self, statuses: Sequence[PassStatus]) -> None:
        """Raise if the graph of some rank has changed. The same on all ranks, and collective if so.

        Raises:
            GraphChangedError: Names the parameters that came or went, by rank.

        Example:
            Of two ranks rank 1 used `left` in the first pass and uses `right` now: both ranks raise, with
            `err.changed == ("left", "right")`.
        """
        told = [rank for rank, status in enumerate(statuses) if status.graph_changed]
        if not told:
            return
        lost: Sequence[int] = ()
        gained: Sequence[int] = ()
        if self._first is not None and self._now is not None:  # else this rank has had no data yet
            lost, gained = sorted(self._first - self._now), sorted(self._now - self._first)
        payloads = self._all_gather(array("q", [len(lost), *lost, *gained]).tobytes())
        rows = {rank: array("q", payloads[rank]).tolist() for rank in told}
        lost_by_rank = {rank: row[1 : 1 + row[0]] for rank, row in rows.items()}
        gained_by_rank = {rank: row[1 + row[0] :] for rank, row in rows.items()}
        raise graph_changed_error(lost_by_rank, gained_by_rank, self._names)


class GraphVariety:
    """Whether a promise of a static graph would have held so far, on this rank.

    It is told only of passes in which something was unused; it is the number of the others that says whether
    all passes were alike.

    Args:
        num_parameters: Of the model.
    """

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._used: frozenset[int] | None = None
        self._num_passes = 0
        self._has_varied = False

    def note(self, used: Callable[[], Collection[int]]) -> None:
        """A pass in which this rank's backward did not reach every parameter; see StaticGraph for `used`."""
        if self._has_varied:
            return
        now = frozenset(used())
        if len(now) == self._num_parameters:  # with the micro-batches before it
            return
        self._num_passes += 1
        self._has_varied = self._used is not None and now != self._used
        self._used = now

    def is_static(self, num_passes: int) -> bool:
        """Whether the graph was the same in all good passes, of which there were so many."""
        return not self._has_varied and self._num_passes in (0, num_passes)


def check_promises(statuses: Sequence[PassStatus]) -> None:
    """Raise if some ranks have promised a static graph after wrapping, and others have not.

    Raises:
        ModelMismatchError: Names both.
    """
    counting = [rank for rank, status in enumerate(statuses) if status.is_count]
    promised = [rank for rank in counting if statuses[rank].static_graph]
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
