"""How long each rank has worked between two passes, as the ranks tell each other with their reports.

The one idea: a backward that waits for others ends at the same time everywhere, so only the time until a rank
begins to wait tells who is slow. The core does the same for ranks that share memory (`note_arrivals`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple

_KEPT = 64  # passes, as in the core


class Arrivals(NamedTuple):
    """In which order the ranks of a model came to the ends of their backwards, summed over passes.

    Attributes:
        passes: How many passes.
        worked_ns: For each rank, how long it worked from the end of a pass to the end of its next backward.
        times_last: In how many passes it was the last to come.
        held_up_ns: How much later than the others it came then, in the mean over these.

    Example:
        Of three ranks, rank 2 was last in the only pass, 4 ms after rank 0 and 6 ms after rank 1:
        `times_last` is (0, 0, 1) and `held_up_ns` (0, 0, 5_000_000).
    """

    passes: int
    worked_ns: Sequence[int]
    times_last: Sequence[int]
    held_up_ns: Sequence[int]

    @staticmethod
    def none(world_size: int) -> Arrivals:
        """What is known before the first pass."""
        return Arrivals(0, *([0] * world_size for _ in range(3)))

    def plus(self, other: Iterable[int | Sequence[int]]) -> Arrivals:
        """These and others of the same ranks, such as those of a further reducer."""
        passes, *rows = Arrivals(*other)  # type: ignore[arg-type]
        return Arrivals(self.passes + passes, *(list(map(add, *pair)) for pair in zip(self[1:], rows)))


class WorkedTimes:
    """The times of the ranks of one model, by the clock of this rank.

    Args:
        world_size: Number of ranks.

    Attributes:
        own_us: How long this rank has worked until the end of this backward; 0: there was no pass before.
        waited_for_ns: For each rank, how long this one has waited because that one worked longer.
    """

    def __init__(self, world_size: int) -> None:
        self.own_us = 0
        self.waited_for_ns = [0] * world_size
        self._passes = 0
        self._worked_ns, self._times_last, self._held_up_ns = ([0] * world_size for _ in range(3))
        self._rows: deque[tuple[int, ...]] = deque(maxlen=_KEPT)
        self._over_at = 0.0

    def end_backward(self, now: float) -> None:
        """This rank has all its gradients, at this time in seconds."""
        self.own_us = max(1, round((now - self._over_at) * 1e6)) if self._over_at else 0

    def end_pass(self, now: float, waited_s: float, worked_us: Sequence[int]) -> int:
        """All ranks have told how long they have worked; returns who came last, or -1: that is not known.

        Example:
            Of two ranks this one has worked for 3 ms and then waited for 8, and the other one has worked for
            10: it has waited for 7 ms for that one, and for 1 ms for the network.
        """
        self._over_at = now
        if not self.own_us or not all(worked_us):  # in the first pass nobody knows
            return -1
        self._rows.append(tuple(worked_us))
        longest = max(range(len(worked_us)), key=worked_us.__getitem__)
        for rank, us in enumerate(worked_us):
            self._worked_ns[rank] += us * 1000
        self._times_last[longest] += 1
        late_us = (len(worked_us) * worked_us[longest] - sum(worked_us)) // max(1, len(worked_us) - 1)
        self._held_up_ns[longest] += late_us * 1000
        self._passes += 1
        behind_ns = (worked_us[longest] - self.own_us) * 1000
        self.waited_for_ns[longest] += max(0, min(behind_ns, round(waited_s * 1e9)))
        return longest

    @property
    def arrivals(self) -> Arrivals:
        """The sums over all passes of which it is known how long each rank has worked."""
        return Arrivals(self._passes, list(self._worked_ns), list(self._times_last), list(self._held_up_ns))

    def by_rank(self) -> list[list[int]]:
        """The last times of each rank, in nanoseconds."""
        return [[row[rank] * 1000 for row in self._rows] for rank in range(len(self.waited_for_ns))]
