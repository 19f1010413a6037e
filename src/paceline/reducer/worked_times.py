"""How long each rank has worked between two passes, as the ranks tell each other with their reports.

The one idea: a backward that waits for others ends at the same time everywhere, so only the time until a rank
begins to wait tells who is slow. The core does the same for ranks that share memory (`note_arrivals`).
Imports the standard library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_KEPT = 64  # passes, as in the core


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
        self._rows: deque[tuple[int, ...]] = deque(maxlen=_KEPT)
        self._over_at = 0.0

    def end_backward(self, now: float) -> None:
        """This rank has all its gradients, at this time in seconds."""
        self.own_us = max(1, round((now - self._over_at) * 1e6)) if self._over_at else 0

    def end_pass(self, now: float, waited_s: float, worked_us: Sequence[int]) -> None:
        """All ranks have told how long they have worked.

        Example:
            Of two ranks this one has worked for 3 ms and then waited for 8, and the other one has worked for
            10: it has waited for 7 ms for that one, and for 1 ms for the network.
        """
        self._over_at = now
        if not self.own_us or not all(worked_us):  # in the first pass nobody knows
            return
        self._rows.append(tuple(worked_us))
        longest = max(range(len(worked_us)), key=worked_us.__getitem__)
        behind_ns = (worked_us[longest] - self.own_us) * 1000
        self.waited_for_ns[longest] += max(0, min(behind_ns, round(waited_s * 1e9)))

    def by_rank(self) -> list[list[int]]:
        """The last times of each rank, in nanoseconds."""
        return [[row[rank] * 1000 for row in self._rows] for rank in range(len(self.waited_for_ns))]
