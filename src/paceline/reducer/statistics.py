"""What is known of the backward passes of a wrapped model without any cost, in one object: `stats()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

_CLEARLY = 1.05
"""A rank that works so many times as long as the others is called slow."""


@dataclass(frozen=True)
class Statistics:
    """What a rank knows of its backward passes, and of the ranks that it makes them with.

    Attributes:
        rank: This rank, among those that train the model.
        world_size: Their number.
        passes: As `num_good_passes`.
        path: As `gradient_path`.
        bits: As `bits`.
        waited_s: Seconds that this rank has waited for others at the end of backward, so far.
        waited_for_s: How much of that was for each rank, because it came last. The rest was for chunks in the
            hands of other ranks, or for the network.
        worked_s: Each rank's median time from the end of a backward to the end of its next backward, without
            waiting, over the last backward passes (64 at most): data, forward, backward and optimizer. Every
            rank knows all of them. Empty: no two backward passes have been made yet.
        times_last: In how many backward passes each rank was the last to come to the end, but for the first
            ones, in which it is not known how long all have worked. Every rank knows this, too.
        held_up_s: How much later than the others each rank came when it was the last, in all backward passes;
            in the mean over the others. What the others would have gained if it had been as fast as they.
        num_buckets: How many buckets a backward averages.
        pass_bytes: How many bytes of gradients a backward averages, on each rank, with what aligns them.
        nonfinite: As `nonfinite()`; empty where nobody looks for them, too.
        num_unused: How many parameters this rank left without a gradient in the last backward.

    Example:
        Rank 1 of two takes 30 ms for each step and rank 0 takes 20; on rank 0, after 100 steps:
        `stats.waited_for_s` is about (0.0, 1.0), `stats.worked_s` about (0.02, 0.03), `stats.slow_rank` 1,
        `stats.times_last` (0, 98) and `stats.held_up_s` (0.0, 0.98).
    """

    rank: int
    world_size: int
    passes: int
    path: str
    bits: str
    waited_s: float
    waited_for_s: tuple[float, ...]
    worked_s: tuple[float, ...]
    times_last: tuple[int, ...]
    held_up_s: tuple[float, ...]
    num_buckets: int
    pass_bytes: int
    nonfinite: Mapping[int, tuple[str, ...]]
    num_unused: int

    @property
    def slow_rank(self) -> int | None:
        """The rank that the others wait for: it works longer than their median, by 5 % at least."""
        if len(self.worked_s) < 2:
            return None
        slowest = max(range(len(self.worked_s)), key=self.worked_s.__getitem__)
        others = [seconds for rank, seconds in enumerate(self.worked_s) if rank != slowest]
        return slowest if self.worked_s[slowest] > _CLEARLY * median(others) else None
