"""How the ranks of a process group exchange reports at the end of a backward.

A report holds what the host knows. Over a process group of devices it would arrive only after the device has
done all earlier work on its streams, and each backward would end with a wait for the device. So ranks of one
host exchange reports through shared memory, and those of several hosts over their process group. All models
over one process group use the same exchange, because reports are paired in the order of calls, as buckets
are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from paceline import _core
from paceline.errors import CollectiveError, RegionError
from paceline.health.store_check import Work
from paceline.reducer.process_group_waits import Rows
from paceline.rendezvous.shared_memory import HostMemory

# By process group. A value must not refer to its group, which would then live for ever.
_reports: weakref.WeakKeyDictionary[Any, Reports | None] = weakref.WeakKeyDictionary()


class Reports(Protocol):
    """Exchanges small payloads of one length between all ranks."""

    def begin(self, payload: bytes) -> tuple[Work, Callable[[], list[bytes]]]:
        """Begin to gather the payloads of all ranks. Collective; does not block."""
        ...


class GroupReports:
    def __init__(self, begin_gather: Callable[[np.ndarray[Any, Any]], tuple[Work, Rows]]) -> None:
        self._begin_gather = begin_gather

    def begin(self, payload: bytes) -> tuple[Work, Callable[[], list[bytes]]]:
        call, rows = self._begin_gather(np.frombuffer(bytearray(payload), np.uint8))
        return call, lambda: [row.tobytes() for row in rows()]


def reports_of(
    group: Any, share_hosts: Callable[[], HostMemory], beside: Callable[[], Reports | None]
) -> Reports | None:
    """The exchange of reports for all models over one process group, other than the group itself. Collective.

    None: the ranks have no memory in common and nothing beside the group, so reports go over the group.
    """
    if group not in _reports:
        try:
            core = share_hosts().of_all_ranks()
        except RegionError:  # raised on every rank
            core = None
        _reports[group] = beside() if core is None else HostReports(core)
    return _reports[group]


class HostReports:
    """Exchanges reports between the ranks of one host, over a group used for nothing else."""

    def __init__(self, core: _core.HostGroup) -> None:
        self._core = core
        self._spare: dict[int, HostGathering] = {}  # by the length of a report; most have one length
        self._under_way: list[HostGathering] = []

    def begin(self, payload: bytes) -> tuple[HostGathering, Callable[[], list[bytes]]]:
        if self._under_way:
            # A backward that failed has dropped its gathering, but the core may still write into its memory.
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
    def __init__(self, core: _core.HostGroup, size: int) -> None:
        self._core, self._size = core, size
        memory = np.empty((core.world_size, size), np.uint8)
        self._rows = [row.data for row in memory]  # these keep the memory alive
        begin = memory.ctypes.data
        self._own = begin + core.rank * size
        self._peers = [(rank, begin + rank * size) for rank in range(core.world_size) if rank != core.rank]
        self._transfers: list[int] = []
        self._error: CollectiveError | None = None

    def start(self, payload: bytes) -> None:
        """Start the messages to and from the other ranks."""
        core, own, size, transfers = self._core, self._own, self._size, self._transfers
        self._rows[core.rank][:] = payload
        for peer, place in self._peers:
            transfers.append(core.start_send(own, size, peer))
            transfers.append(core.start_receive(place, size, peer))

    def is_completed(self) -> bool:
        core, transfers = self._core, self._transfers
        try:
            while transfers:
                if not core.test(transfers[-1]):
                    return False
                core.wait(transfers.pop())  # raises the message's error
        except CollectiveError as error:
            self._error = error
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def rows(self) -> list[bytes]:
        return [bytes(row) for row in self._rows]

    def forget(self) -> bool:
        self._transfers = [each for each in self._transfers if not self._core.forget(each)]
        return not self._transfers
