"""What the outcome of a pass means for the user. The same for every framework, and on every rank.

Imports only the standard library, `errors` and its neighbours.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from paceline.errors import ConfigError
from paceline.reducer.frozen import differ_in_frozen_only, is_all_unused_frozen
from paceline.reducer.protocol import Outcome, PassStatus, Reducer
from paceline.reducer.report import (
    check_refused,
    check_twice,
    nobodys_warning,
    nonfinite_error,
    skipped_error,
    unused_error,
)
from paceline.reducer.static_graph import StaticGraph, check_promises


class Judge:
    """Raises, warns or lets the ranks go on.

    Args:
        names: Of the parameters, by index in the plan.
        world_size: Number of ranks.
        allow_unused: A parameter without a gradient contributes 0.
        nonfinite: What to do about infinities and NaNs: "warn" once, "raise", or "ignore".
        static_graph: Where that is promised.
    """

    def __init__(
        self,
        names: Sequence[str],
        world_size: int,
        *,
        allow_unused: bool,
        nonfinite: str,
        static_graph: StaticGraph | None = None,
    ) -> None:
        self._names = names
        self._world_size = world_size
        self._allow_unused = allow_unused
        self._nonfinite = nonfinite
        self._static_graph = static_graph
        self._has_warned = False
        self._has_warned_of_nobodys = False

    def judge(self, outcome: Outcome, reducer: Reducer, refusal: ConfigError | None = None) -> None:
        """Look at what `reducer.finish` returned; the same on every rank.

        Args:
            outcome: That.
            reducer: Knows more.
            refusal: Why a gradient of this rank cannot be averaged.

        Raises:
            ConfigError: Some rank refused a gradient; the pass is void.
            ModelMismatchError: Some ranks have promised a static graph, others not; the pass is void.
            SkippedPassError, UnusedParameterError, GraphChangedError: The pass is void.
            NonFiniteGradientError: The means are in place, but hold an infinity or a NaN.
        """
        statuses = reducer.statuses()
        if not any(status.interrupted for status in statuses):
            if refusal is not None:
                raise refusal
            check_refused(statuses, self._names)
            check_twice(statuses, self._names)
            if self._static_graph is not None:
                self._static_graph.check(statuses)
        if Outcome.SKIPPED in outcome and not differ_in_frozen_only(statuses):
            check_promises(statuses)
            raise skipped_error(statuses)
        if Outcome.SKIPPED in outcome or (
            Outcome.UNUSED in outcome and not self._allow_unused and not is_all_unused_frozen(reducer)
        ):
            raise unused_error([reducer.unused(rank) for rank in range(self._world_size)], self._names)
        if Outcome.NOBODYS in outcome and not self._has_warned_of_nobodys:
            self._has_warned_of_nobodys = True
            text = nobodys_warning(reducer.globally_unused(), self._names, self._world_size)
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        if outcome & (Outcome.NONFINITE | Outcome.OVERFLOWED):
            self.judge_nonfinite(reducer.nonfinite(), reducer.overflowed())

    def judge_nonfinite(self, pairs: Sequence[tuple[int, int]], overflowed: Sequence[int] = ()) -> None:
        """Look at (rank, parameter) of each gradient that was not finite, and at sums that are not."""
        if (pairs or overflowed) and self._nonfinite != "ignore":
            error = nonfinite_error(pairs, self._names, self._world_size, overflowed)
            if self._nonfinite == "raise":
                raise error
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"{error}\n  (reported once)", RuntimeWarning, stacklevel=3)


def give_up_interrupted(reducer: Reducer, allow_unused: bool, allow_nobodys: bool) -> Exception | None:
    """End a pass that an exception broke off, so that all ranks learn of it and can go on. Collective.

    Returns:
        What to raise, on this rank as on the others.
    """
    outcome = Outcome(reducer.finish(PassStatus(interrupted=True), allow_unused, allow_nobodys))
    return skipped_error(reducer.statuses()) if Outcome.SKIPPED in outcome else None
