"""Reports of ranks that share a host, exchanged in memory and not over a process group."""

from __future__ import annotations

from collections.abc import Callable

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
        self._spare: dict[int, HostGathering] = {}  # by the length of a report; most are of one length
        self._under_way: list[HostGathering] = []

    def begin(self, payload: bytes) -> tuple[HostGathering, Callable[[], list[bytes]]]:
        """Send this rank's report to all others. Does not block.

        Args:
            payload: Of the same length on all ranks.

        Returns:
            What tells when those of all ranks have come, and what returns them then, by rank.
        """
        if self._under_way:
            # The backward that gave one up has let go of it, but the core may still write into its memory.
            self._under_way = [each for each in self._under_way if not each.forget()]
        gathering = self._spare.pop(len(payload), None) or HostGathering(self._core, len(payload))
        self._under_way.append(gathering)
        gathering.start(payload)

        def rows() -> list[bytes]:
            self._under_way.remove(gathering)
            self._spare[len(payload)] = gathering
            return gathering.rows()

        return gathering, rows


class HostGathering:
    """Memory for the reports of all ranks, and these on their way, as messages between each two.

    Args:
        core: See `HostReports`.
        size: The length of a report in bytes.
    """

    def __init__(self, core: _core.HostGroup, size: int) -> None:
        self._core, self._size = core, size
        memory = np.empty((core.world_size, size), np.uint8)
        self._rows = [row.data for row in memory]  # which keep the memory
        begin = memory.ctypes.data
        self._own = begin + core.rank * size
        self._peers = [(rank, begin + rank * size) for rank in range(core.world_size) if rank != core.rank]
        self._transfers: list[int] = []
        self._error: CollectiveError | None = None

    def start(self, payload: bytes) -> None:
        """Start the messages to and from the other ranks. Once those that it started before are over."""
        core, own, size, transfers = self._core, self._own, self._size, self._transfers
        self._rows[core.rank][:] = payload
        for peer, place in self._peers:
            transfers.append(core.start_send(own, size, peer))
            transfers.append(core.start_receive(place, size, peer))

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
        return [bytes(row) for row in self._rows]

    def forget(self) -> bool:
        """Whether the core is done with the memory; what has come is let go."""
        self._transfers = [each for each in self._transfers if not self._core.forget(each)]
        return not self._transfers
