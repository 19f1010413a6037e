"""What the backward passes of one model have come to so far, for whoever asks; nothing here changes anything.

The one idea: norms, infinities and times of waiting are known when a backward is over, without a further look
at a gradient or a call to another rank. They lie with the reducer in use, with those of earlier plans and
with the sparse gradients; here they are put together and get names.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, final

from paceline.reducer.backward.fresh_gradients import FreshGradients
from paceline.reducer.backward.front_end import FrontEnd
from paceline.reducer.backward.planning import Planning
from paceline.reducer.backward_errors import names_by_rank
from paceline.reducer.statistics import Statistics
from paceline.reducer.worked_times import Arrivals


@final
class Figures:
    """The figures of all backward passes of one model. None of its methods is collective.

    Args:
        front_end: What the framework gives: parameters, sparse gradients.
        planning: The plan in use, and what earlier ones have left.
        fresh: Whether gradients are still those of the last backward.
        asks_for_nonfinite: Whether somebody looks for infinities wherever gradients are averaged.
    """

    def __init__(
        self, front_end: FrontEnd[Any], planning: Planning, fresh: FreshGradients, *, asks_for_nonfinite: bool
    ) -> None:
        self._tensors, self._sparse = front_end.tensors, front_end.sparse
        self._planning, self._fresh = planning, fresh
        self._asks_for_nonfinite = asks_for_nonfinite

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent waiting for the others at the end of backward, so far."""
        return self._planning.earlier.waited_s(self._planning.reduction.reducer)

    def arrivals(self) -> Arrivals:
        """How the ranks have come to the ends of their backward passes."""
        return self._planning.earlier.arrivals(self._planning.reduction.reducer)

    def squared_norm(self) -> float:
        """The squared norm of the last backward's mean gradient; NaN if that backward was void, or raised."""
        of_plan = self._planning.earlier.squared_norm(self._planning.reduction.reducer)
        return of_plan + self._sparse.squared_norm

    def known_norm(self) -> float | None:
        """The 2-norm of all gradients that the plan lists, if it is that of the last backward's means."""
        if not self._fresh.are_unchanged() or self._planning.reduction.reducer.globally_unused():
            return None
        norm = math.sqrt(self.squared_norm())
        return None if math.isnan(norm) else norm  # of a void backward, too

    @property
    def looks_for_nonfinite(self) -> bool:
        """Whether anybody looks at the gradients: in memory that costs nothing."""
        return self._planning.communicator.path != "group" or self._asks_for_nonfinite

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Names of parameters whose gradient was not finite in the last backward, by rank."""
        pairs = self._planning.earlier.nonfinite(self._planning.reduction.reducer)
        found = names_by_rank(pairs, self._tensors.names)
        for rank, names in names_by_rank(self._sparse.nonfinite, self._tensors.all_names).items():
            found[rank] = (*found.get(rank, ()), *names)
        return found

    def statistics(self, good_backwards: int) -> Statistics:
        """All that is known of the backward passes so far, of which so many were good; see `Statistics`."""
        communicator, earlier = self._planning.communicator, self._planning.earlier
        plan, reducer = self._planning.reduction.plan, self._planning.reduction.reducer
        arrivals = earlier.arrivals(reducer)
        worked = [statistics.median(times) / 1e9 for times in reducer.worked_ns if times]
        return Statistics(
            rank=communicator.rank,
            world_size=communicator.world_size,
            passes=good_backwards,
            path=communicator.path,
            bits=communicator.bits,
            waited_s=earlier.waited_s(reducer),
            waited_for_s=tuple(ns / 1e9 for ns in earlier.waited_for_ns(reducer)),
            worked_s=tuple(worked),
            times_last=tuple(arrivals.times_last),
            held_up_s=tuple(ns / 1e9 for ns in arrivals.held_up_ns),
            num_buckets=len(plan.buckets),
            pass_bytes=sum(bucket.nbytes for bucket in plan.buckets),
            nonfinite=self.nonfinite() if self.looks_for_nonfinite else {},
            num_unused=len(reducer.unused(communicator.rank)) if good_backwards else 0,
        )
