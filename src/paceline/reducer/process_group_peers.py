"""The ranks of a framework's process group: small messages between them, and their peer monitor."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from paceline.collectives.formation import share_on_each_host
from paceline.errors import RegionError
from paceline.health.control_channel import ControlChannel
from paceline.health.peer_monitor import (
    ChannelSource,
    MemorySource,
    PeerMonitor,
    report_no_peer_monitor,
)
from paceline.health.store_check import StoreChecks, Work
from paceline.reducer.communicator import gather_bytes
from paceline.reducer.host_reports import GroupReports, Reports, reports_of
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.process_group_channels import channel_of
from paceline.reducer.process_group_waits import Rows
from paceline.rendezvous.secret import find_secret
from paceline.rendezvous.shared_memory import HostMemory
from paceline.rendezvous.signatures import KeyStore, Signatures, SignedKeyStore

_Tensor = TypeVar("_Tensor")
_store_checks: weakref.WeakKeyDictionary[Any, StoreChecks] = weakref.WeakKeyDictionary()


def store_checks_of(
    group: Any,
    rank: int,
    world_size: int,
    store: KeyStore | None,
    *,
    scope: str,
    holder: int | None,
    words: str,
) -> StoreChecks:
    """The store checks of a process group, made once, so that all ranks number its calls alike."""
    if group not in _store_checks:
        signed = None if store is None else SignedKeyStore(store, Signatures(find_secret().key, scope))
        _store_checks[group] = StoreChecks(signed, rank, world_size, holder, words)
    return _store_checks[group]


class ProcessGroupExchange:
    """An `Exchange` over the user's process group, so that Paceline opens no further port.

    Payloads are plain bytes; nothing is pickled.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        begin_gather: Callable[[np.ndarray[Any, Any]], tuple[Work, Rows]],
        checks: StoreChecks,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._begin_gather, self._checks = begin_gather, checks

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s

        def gather(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            begun: list[Rows] = []

            def start() -> Work:
                call, rows = self._begin_gather(array)
                begun.append(rows)
                return call

            self._checks.complete(start, "all_gather", timeout_s, deadline)
            return begun[0]()

        return gather_bytes(gather, payload)


class ProcessGroupPeers(ABC, Generic[_Tensor]):
    FRAMEWORK: ClassVar[str]
    """The framework's name and version, which must be the same on all ranks: "torch 2.13.0"."""

    def __init__(
        self,
        calls: ProcessGroupCalls[_Tensor],
        exchange: ProcessGroupExchange,
        name: str,
        timeout_s: float,
        warn_after_s: float,
    ) -> None:
        self.calls, self.exchange = calls, exchange
        self.process_group: Any = calls.group
        self.rank, self.world_size = calls.rank, calls.world_size
        self.timeout_s, self.warn_after_s = timeout_s, warn_after_s
        self._name = name
        calls.reports = self.reports

    @abstractmethod
    def check_calls(self, owner: str, *, on_host: bool, reduce_through: str, between_hosts: bool) -> None:
        """Raise if the group cannot do what is asked."""

    def share_hosts(self) -> HostMemory:
        """Collective."""
        return share_on_each_host(
            self.exchange, name=self._name, timeout_s=self.timeout_s, warn_after_s=self.warn_after_s
        )

    def channel(self, hosts: Sequence[Sequence[int]]) -> ControlChannel:
        """Collective."""
        return channel_of(self.process_group, self, hosts, self.FRAMEWORK)

    def find_peer_monitor(self) -> PeerMonitor | None:
        """A peer monitor over memory of all ranks, or over the control channel of several hosts. Collective.

        The memory holds no gradient. None: there is neither, so errors cannot name lost ranks; rank 0 logs
        it.
        """
        try:
            memory = self.share_hosts()
        except RegionError as error:  # raised on every rank; gradients do not need this memory
            report_no_peer_monitor(error, self.rank)
            return None
        core = memory.of_all_ranks()
        return PeerMonitor(ChannelSource(self.channel(memory.hosts)) if core is None else MemorySource(core))

    def reports(self) -> Reports:
        """Collective."""
        over_group = GroupReports(self.calls.begin_gather)
        if self.world_size == 1:  # a single rank never uses it
            return over_group
        return reports_of(self.process_group, self.share_hosts, self._reports_beside) or over_group

    def _reports_beside(self) -> Reports | None:
        """Reports over something else than the group, which must not refer to the group. Collective."""
        return None
