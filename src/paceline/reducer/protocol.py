"""What a front end asks of a reducer, whatever moves the bytes.

Implemented by `paceline._core.Reducer` (shared memory), `ProcessGroupReducer` (any asynchronous all-reduce)
and `HierarchicalReducer` (memory of several hosts and messages between them).
"""

from __future__ import annotations

from enum import IntFlag
from typing import Protocol

from paceline import _core

BackwardStatus = _core.BackwardStatus
"""What a rank reports to the others of its backward at its end; `pack()` makes it one word, for them all."""
BackwardResult = _core.BackwardResult
"""What a backward has come to, the same on every rank but for `overlapping` and `first_bucket_ns`.

`outcome` is an `Outcome`; `is_void` tells that gradients are no means. By rank: `statuses`, `notes`, and
`unused`, the parameters that a rank did not mark; `globally_unused`: those that no rank with data marked.
`nonfinite` has (rank, parameter) of each gradient that was not finite, `overflowed` the parameters whose mean
is not though every rank's gradient is, `overlapping` those whose gradients shared memory with others' on this
rank, so that their means lie in the gradient buffer alone. `first_bucket_ns` is when this rank's first bucket
was complete, as `time.monotonic_ns()` tells it.
"""
BackwardTimes = _core.BackwardTimes
"""When the ranks of one model come to the ends of their backward passes, in sums; by rank in all lists.

`waited_ns` is what this rank has waited there for others, and `waited_for_ns` how much of that was because a
rank came last. Of `backwards`, all but the first one of each plan: `worked_ns`, how long each rank worked
from the end of a backward to the end of its next backward, without waiting; `times_last`, in how many it was
the last to come; `held_up_ns`, how much later than the others it came then, in the mean over these.
`recent_ns` has the last of the times that `worked_ns` adds up, in no order.
"""


class Outcome(IntFlag):
    """What `Reducer.finish` found; the same value on every rank."""

    GOOD = 0
    UNUSED = _core.OUTCOMES["unused"]
    """Some rank left parameters unused."""
    NONFINITE = _core.OUTCOMES["nonfinite"]
    """Some rank's gradients hold an infinity or a NaN."""
    SKIPPED = _core.OUTCOMES["skipped"]
    """Ranks skipped a forward or a backward, by `BackwardStatus.agree`; or an exception broke one off."""
    FINISHED = _core.OUTCOMES["finished"]
    """Some rank has no more data."""
    OVERFLOWED = _core.OUTCOMES["overflowed"]
    """A sum over ranks holds an infinity or a NaN, though each rank's gradients are finite."""
    NOTES_DIFFER = _core.OUTCOMES["notes_differ"]
    """Ranks reported different notes of themselves; the means are in place."""
    GLOBALLY_UNUSED = _core.OUTCOMES["globally_unused"]
    """In place of UNUSED: all ranks left the same parameters unused; the means are in place."""
    REPORTED = _core.OUTCOMES["reported"]
    """Some rank reports more than its counts of forwards; see BackwardStatus."""


class Reducer(Protocol):
    """Averages the gradients of one model over the ranks, one backward after the other. Collective.

    A parameter is meant by its index in the plan. A backward begins with the first `mark_ready` after the
    previous `finish`.
    """

    @property
    def times(self) -> BackwardTimes:
        """When the ranks came to the ends of backward passes, since the reducer was made."""
        ...

    @property
    def last(self) -> BackwardResult | None:
        """What the last `finish` returned, for a caller that an exception has kept from it; None: nothing."""
        ...

    def set_weight(self, weight: float, is_in_gradients: bool = False) -> None:
        """Weigh this rank's gradients in the next backward's mean, sum(w_r * g_r) / sum(w_r).

        Args:
            weight: w_r.
            is_in_gradients: What is handed over is w_r * g_r, on all ranks. Not over a process group.
        """
        ...

    def set_note(self, note: int, recorded_backward: int = -1) -> None:
        """What this rank reports of itself with the end of this backward, in 32 bits; 0: nothing.

        Args:
            note: These bits.
            recorded_backward: The backward as a recording numbers it (`backward_id`): `finish` notes that
                this rank has all its gradients, and begins to wait. Negative: it is no backward that is
                recorded.
        """
        ...

    def mark_ready(self, param: int, grad_pointer: int) -> None:
        """This rank's gradient of `param` is final, at `grad_pointer`; 0: in the gradient buffer.

        Raises:
            RuntimeError: Marked before in this backward.
        """
        ...

    def mark_copied(self, param: int, grad_pointer: int, nbytes: int, is_shared: bool = False) -> None:
        """This rank's gradient of `param` is final, and was copied into the gradient buffer from this memory.

        The caller copies the mean back there, unless the result says that others share the memory.

        Args:
            param: Index of the parameter.
            grad_pointer: Where the gradient is.
            nbytes: From its first element to its last.
            is_shared: Whether other wrapped models have the parameter, too. They may get its gradient from
                the same memory, and all of them the same mean.

        Raises:
            RuntimeError: Marked before in this backward.
        """
        ...

    def mark_unused(self, param: int) -> None:
        """This backward has not used `param`, but what its place in the gradient buffer holds counts.

        `param` stays unmarked: for `unused` and `globally_unused` it is as any other that is unused, but its
        place is not filled with zeros by `finish`. To be called after the last gradient.
        """
        ...

    def add_foreign(self, pointer: int, nbytes: int) -> None:
        """A tensor that is no parameter's gradient holds this memory of one that was handed over, too.

        Nothing is written there: that gradient is one of `BackwardResult.overlapping`. It is the gradient of
        an input, say.
        """
        ...

    def finish(
        self, status: BackwardStatus, allow_unused: bool, allow_globally_unused: bool = False
    ) -> BackwardResult:
        """End this rank's backward; block until the gradient buffer holds the means.

        Args:
            status: What this rank reports of the backward; the same on all ranks but those without data.
            allow_unused: Let parameters that this rank has not marked contribute 0. Otherwise one unmarked
                parameter makes the backward void on all ranks.
            allow_globally_unused: Let those unmarked parameters contribute 0 that no rank with data has
                marked. The same on all ranks.
        """
        ...

    def waiting_ranks(self) -> list[int]:
        """Ranks that wait at the end of a backward that this rank has not ended, as far as known."""
        ...

    def squared_norm(self) -> float:
        """The squared norm of the last mean gradient, over all parameters; NaN if it was not averaged."""
        ...

    def give_up(self, error: BaseException) -> None:
        """This rank has failed elsewhere, and goes on no more: the others raise, if they can be told.

        Does not block.
        """
        ...

    def close(self) -> None:
        """Give the memory back. The reducer is unusable afterwards."""
        ...
