"""The stage that a rank has reached in the end of a backward, so that it can resume after an exception."""

from __future__ import annotations

from paceline.reducer.reducer_interface import BackwardResult

# The stages, in order. Module-level numbers, because reading them from a class makes each step slower.
(
    JUDGE,
    IN_WRITES,
    MEANS,
    IN_SPARSE,
    STEPS,
    IN_STEPS,
    CLOSE,
    IN_ADOPTION,
    NEXT,
    ORDER,
    IN_ORDER,
    BUFFERS,
    IN_BUFFERS,
    IN_HOOK,
    GOOD,
    IN_AFTER_GOOD,
    NOTES,
    IN_DRIFT,
    REST,
) = range(19)
OF_ALL_RANKS = frozenset({IN_WRITES, IN_SPARSE, IN_ORDER, IN_BUFFERS, IN_AFTER_GOOD, IN_DRIFT})
MADE_ONCE = frozenset({IN_STEPS, IN_HOOK, IN_ADOPTION})
AFTER = {MEANS: STEPS, CLOSE: NEXT}


class EndProgress:
    """The progress of this rank in the end of a backward whose outcome all ranks know.

    Attributes:
        stage: The stage that comes next, or is under way.
        seen_order: The order in which gradients came, if the plan is to adopt it; else None.
    """

    __slots__ = ("drift_backwards", "good_backwards", "number", "result", "seen_order", "stage")

    def __init__(
        self, number: int, good_backwards: int, drift_backwards: int, result: BackwardResult
    ) -> None:
        self.number, self.good_backwards, self.drift_backwards = number, good_backwards, drift_backwards
        self.result = result
        self.stage = JUDGE
        self.seen_order: list[int] | None = None
