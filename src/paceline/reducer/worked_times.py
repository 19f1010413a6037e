"""In which order the ranks came to the ends of their backward passes, as every reducer sums it up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple


class Arrivals(NamedTuple):
    """In which order the ranks of a model came to the ends of their backward passes, summed.

    Attributes:
        backwards: How many backward passes.
        worked_ns: For each rank, how long it worked from the end of a backward to the end of its next
            backward.
        times_last: In how many backward passes it was the last to come.
        held_up_ns: How much later than the others it came then, in the mean over these.

    Example:
        Of three ranks, rank 2 was last in the only backward pass, 4 ms after rank 0 and 6 ms after rank 1:
        `times_last` is (0, 0, 1) and `held_up_ns` (0, 0, 5_000_000).
    """

    backwards: int
    worked_ns: Sequence[int]
    times_last: Sequence[int]
    held_up_ns: Sequence[int]

    @staticmethod
    def none(world_size: int) -> Arrivals:
        """What is known before the first backward."""
        return Arrivals(0, *([0] * world_size for _ in range(3)))

    def plus(self, other: Iterable[int | Sequence[int]]) -> Arrivals:
        """These and others of the same ranks, such as those of a further reducer."""
        backwards, *rows = Arrivals(*other)  # type: ignore[arg-type]
        return Arrivals(self.backwards + backwards, *(list(map(add, *pair)) for pair in zip(self[1:], rows)))
