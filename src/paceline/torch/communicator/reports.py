"""How the ranks of a process group report to each other at the end of a backward.

A report says what the host knows. Through NCCL it would come back only when the device has done all that lies
before it on its streams, and each backward would end with a wait for the device. So ranks of one host report
through memory that they share; those of several hosts over the process group where it serves the CPU, and
else over a group of Gloo beside it. All models over one process group share the same, because reports pair in
the order of calls, as buckets do.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore

from paceline.errors import RegionError
from paceline.reducer.host_reports import HostReports
from paceline.torch.communicator.calls import Call, asynchronous
from paceline.torch.communicator.exchange import transport_device
from paceline.torch.communicator.kept import keep
from paceline.torch.communicator.peers import ProcessGroupPeers
from paceline.torch.communicator.stores import store_of

_reports: weakref.WeakKeyDictionary[dist.ProcessGroup, Reports] = weakref.WeakKeyDictionary()


class Reports(Protocol):
    """Exchanges small payloads of one length between all ranks."""

    def begin(self, payload: bytes) -> tuple[Call, Callable[[], list[bytes]]]:
        """Begin to gather the payloads of all ranks. Collective, does not block.

        Returns:
            The call, and what returns the payloads, by rank, once it is over.
        """
        ...


class GroupReports:
    """Reports over a process group, in its order of calls.

    Args:
        group: Also one that is not registered with torch; torch's stubs lack the `allgather` of such groups.
        device: Where tensors lie that it moves.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self._device = group, device
        self._options = asynchronous(AllgatherOptions())

    def begin(self, payload: bytes) -> tuple[Call, Callable[[], list[bytes]]]:
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        keep(own, *rows)
        work = self.group.allgather([rows], [own], self._options)
        return work, lambda: [row.cpu().numpy().tobytes() for row in rows]


def reports_of(peers: ProcessGroupPeers) -> Reports:
    """How these ranks report to each other: the same for all models over one process group. Collective."""
    if peers.process_group not in _reports:
        _reports[peers.process_group] = _in_memory(peers) or _over_group(peers)
    return _reports[peers.process_group]


def _in_memory(peers: ProcessGroupPeers) -> HostReports | None:
    """Through the memory that all ranks share; None: they are on several hosts, or there is too little."""
    try:
        core = peers.share_hosts().of_all_ranks() if peers.world_size > 1 else None
    except RegionError:  # on every rank
        return None
    return None if core is None else HostReports(core)


def _over_group(peers: ProcessGroupPeers) -> GroupReports:
    device = transport_device(peers.process_group)
    beside = None if device.type == "cpu" or peers.world_size == 1 else _beside(peers)
    return beside or GroupReports(peers.process_group, device)


def _beside(peers: ProcessGroupPeers) -> GroupReports | None:
    """Over a group of Gloo; None: some rank could not connect, and reports go through the device on all."""
    # Keys that no other group of these ranks, and no earlier life of theirs, has used in the user's store.
    nonces = peers.exchange.all_gather(secrets.token_hex(8).encode(), peers.timeout_s)
    made = None
    try:
        store = store_of(peers.process_group)
        if store is not None:
            keys = PrefixStore(f"paceline/reports/{nonces[0].decode()}", store)
            timeout = timedelta(seconds=peers.timeout_s)
            made = dist.ProcessGroupGloo(keys, peers.rank, peers.world_size, timeout=timeout)
    except (AttributeError, RuntimeError):  # a torch without Gloo; an interface that others cannot reach
        pass
    told = peers.exchange.all_gather(b"0" if made is None else b"1", peers.timeout_s)
    return GroupReports(made, torch.device("cpu")) if all(each == b"1" for each in told) else None
