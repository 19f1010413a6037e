"""Reports of ranks that share a host, exchanged in memory and not over a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline import _core
from paceline.errors import CollectiveError


class HostReports:
    """Exchanges reports between the ranks of one host.

    All models over one process group share it: reports pair in the order of calls, as their buckets do, so
    that a rank in the backward of another model is found at once.

    Args:
        core: A group of these ranks, in the same order. Nothing else sends messages over it.
    """

    def __init__(self, core: _core.HostGroup) -> None:
        self._core = core
        self._peers = [rank for rank in range(core.world_size) if rank != core.rank]
        self._under_way: list[HostGathering] = []

    def begin(self, payload: bytes) -> tuple[HostGathering, Callable[[], list[bytes]]]:
        """Send this rank's report to all others. Does not block.

        Args:
            payload: Of the same length on all ranks.

        Returns:
            What tells when those of all ranks have come, and what returns them then, by rank.
        """
        # The backward that gave one up has let go of it, but the core may still write into its memory.
        self._under_way = [each for each in self._under_way if not each.forget()]
        gathering = HostGathering(self._core, payload)
        self._under_way.append(gathering)
        gathering.start(self._peers)
        return gathering, gathering.rows


class HostGathering:
    """The reports of all ranks on their way, as messages between each two.

    Args:
        core: See `HostReports`.
        payload: This rank's.
    """

    def __init__(self, core: _core.HostGroup, payload: bytes) -> None:
        self._core = core
        self._rows = np.empty((core.world_size, len(payload)), np.uint8)
        self._rows[core.rank] = np.frombuffer(payload, np.uint8)
        self._transfers: list[int] = []
        self._error: CollectiveError | None = None

    def start(self, peers: Sequence[int]) -> None:
        """Start the messages to and from these ranks."""
        core, size, begin = self._core, self._rows.shape[1], self._rows.ctypes.data
        own = begin + core.rank * size
        for peer in peers:
            self._transfers.append(core.start_send(own, size, peer))
            self._transfers.append(core.start_receive(begin + peer * size, size, peer))

    def is_completed(self) -> bool:
        """Whether all have come, or some will not, which `wait` raises."""
        core, transfers = self._core, self._transfers
        try:
            while transfers:
                if not core.test(transfers[-1]):
                    return False
                core.wait(transfers.pop())  # raises what went wrong with the message
        except CollectiveError as error:
            self._error = error
        return True

    def wait(self) -> None:
        """Raise why some report did not come. Called once `is_completed`."""
        if self._error is not None:
            raise self._error

    def rows(self) -> list[bytes]:
        """The reports, by rank."""
        return [row.tobytes() for row in self._rows]

    def forget(self) -> bool:
        """Whether the core is done with the memory; what has come is let go."""
        self._transfers = [each for each in self._transfers if not self._core.forget(each)]
        return not self._transfers
