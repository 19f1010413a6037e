"""The interface between a front end and a reducer.

Implemented by `paceline._core.Reducer` (shared memory), `ProcessGroupReducer` (any asynchronous all-reduce)
and `HierarchicalReducer` (shared memory of several hosts, and messages between them).
"""

from __future__ import annotations

from enum import IntFlag
from typing import Protocol

from paceline import _core

BackwardStatus = _core.BackwardStatus
"""What a rank reports to the others at the end of its backward; `pack()` makes one integer of it."""
BackwardResult = _core.BackwardResult
"""The result of a backward, the same on every rank except for `overlapping` and `first_bucket_ns`.

`outcome` is an `Outcome`; `is_void` says that the gradients are not means. By rank: `statuses`, `notes`, and
`unused`, the parameters that a rank did not mark. `globally_unused` has those that no rank with data marked.
`nonfinite` has (rank, parameter) of each gradient that was not finite. `overflowed` has the parameters whose
mean is not finite although every rank's gradient is. `overlapping` has those whose gradients shared memory
with others on this rank, so that their means are only in the gradient buffer. `first_bucket_ns` is the
`time.monotonic_ns()` at which this rank's first bucket was complete.
"""
BackwardTimes = _core.BackwardTimes
"""When the ranks of one model reach the ends of their backward passes, as sums; all lists are by rank.

`waited_ns` is how long this rank has waited there for others, and `waited_for_ns` how much of that was
because a rank came last. The following count all of `backwards` except the first one of each plan:
`worked_ns`, how long each rank worked from the end of one backward to the end of its next, without waiting;
`times_last`, how often it was the last; `held_up_ns`, how much later than the mean of the others it came
then. `recent_ns` has the last of the times that `worked_ns` adds up, in no order.
"""


class Outcome(IntFlag):
    """The outcome of `Reducer.finish`; the same value on every rank."""

    GOOD = 0
    UNUSED = _core.OUTCOMES["unused"]
    """Some rank left parameters unused."""
    NONFINITE = _core.OUTCOMES["nonfinite"]
    """Some rank's gradients hold an infinity or a NaN."""
    SKIPPED = _core.OUTCOMES["skipped"]
    """Ranks skipped a forward or a backward, by `BackwardStatus.agree`; or an exception interrupted one."""
    FINISHED = _core.OUTCOMES["finished"]
    """Some rank has no more data."""
    OVERFLOWED = _core.OUTCOMES["overflowed"]
    """A sum over ranks holds an infinity or a NaN, though each rank's gradients are finite."""
    NOTES_DIFFER = _core.OUTCOMES["notes_differ"]
    """Ranks reported different notes; the means are in place."""
    GLOBALLY_UNUSED = _core.OUTCOMES["globally_unused"]
    """Instead of UNUSED: all ranks left the same parameters unused; the means are in place."""
    REPORTED = _core.OUTCOMES["reported"]
    """Some rank's status has more than its counts of forwards; see BackwardStatus."""


class Reducer(Protocol):
    """Averages the gradients of one model over the ranks, one backward after the other. Collective.

    Parameters are given by their index in the plan. A backward begins with the first `mark_ready` after the
    previous `finish`.
    """

    @property
    def times(self) -> BackwardTimes:
        """When the ranks reached the ends of backward passes, since the reducer was made."""
        ...

    @property
    def last(self) -> BackwardResult | None:
        """What the last `finish` returned, for a caller that an exception kept from receiving it; or None."""
        ...

    def set_weight(self, weight: float, is_in_gradients: bool = False) -> None:
        """Weigh this rank's gradients in the next backward's mean, sum(w_r * g_r) / sum(w_r).

        Args:
            weight: w_r.
            is_in_gradients: Whether the gradients handed over are already w_r * g_r, on all ranks. Not
                supported over a process group.
        """
        ...

    def set_note(self, note: int, recorded_backward: int = -1) -> None:
        """Set the note, of 32 bits, that this rank reports at the end of this backward; 0: none.

        Args:
            note: These bits.
            recorded_backward: The backward as a recording numbers it (`backward_id`): `finish` records that
                this rank has all its gradients and begins to wait. Negative: this backward is not recorded.
        """
        ...

    def mark_ready(self, param: int, grad_pointer: int) -> None:
        """Note that this rank's gradient of `param` is final, at `grad_pointer`; 0: in the gradient buffer.

        Raises:
            RuntimeError: Marked before in this backward.
        """
        ...

    def mark_copied(self, param: int, grad_pointer: int, nbytes: int, is_shared: bool = False) -> None:
        """Note that this rank's gradient of `param` is final and was copied into the gradient buffer.

        The caller copies the mean back, unless the result says that other gradients share the memory.

        Args:
            param: Index of the parameter.
            grad_pointer: Where the gradient is.
            nbytes: From its first element to its last.
            is_shared: Whether other wrapped models have the parameter, too. They may hand over its gradient
                from the same memory, and all of them get the same mean.

        Raises:
            RuntimeError: Marked before in this backward.
        """
        ...

    def mark_unused(self, param: int) -> None:
        """Note that this backward has not used `param`, but the value in its place counts.

        `param` stays unmarked, so `unused` and `globally_unused` include it, but `finish` does not fill its
        place with zeros. Call this after the last gradient.
        """
        ...

    def add_foreign(self, pointer: int, nbytes: int) -> None:
        """Note that some other tensor shares memory with a gradient that was handed over.

        Nothing is written to that memory, and the gradient becomes one of `BackwardResult.overlapping`. An
        example is the gradient of an input.
        """
        ...

    def finish(
        self, status: BackwardStatus, allow_unused: bool, allow_globally_unused: bool = False
    ) -> BackwardResult:
        """End this rank's backward; block until the gradient buffer holds the means.

        Args:
            status: What this rank reports of the backward; the same on all ranks except those without data.
            allow_unused: Let parameters that this rank has not marked contribute 0. Otherwise one unmarked
                parameter makes the backward void on all ranks.
            allow_globally_unused: Let unmarked parameters contribute 0 if no rank with data has marked them.
                The same on all ranks.
        """
        ...

    def waiting_ranks(self) -> list[int]:
        """Ranks that wait at the end of a backward that this rank has not ended, as far as known."""
        ...

    def squared_norm(self) -> float:
        """The squared norm of the last mean gradient, over all parameters; NaN if it was not averaged."""
        ...

    def give_up(self, error: BaseException) -> None:
        """Fail because of an error elsewhere on this rank; the others raise, if they can be reached.

        Does not block.
        """
        ...

    def close(self) -> None:
        """Free the memory. The reducer is unusable afterwards."""
        ...
