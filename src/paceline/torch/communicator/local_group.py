"""A torch process group for the ranks of one host, which Paceline creates, and the calls on it.

It is not registered with torch as `new_group` would do: names of registered groups depend on how many groups
a rank is in, and creating one splits NCCL's communicator of all ranks if that is bound to a device. All
models over one process group share the host's group: NCCL matches calls by their order, and the models'
reports check that order.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from paceline.errors import ConfigError, RendezvousError, format_ranks
from paceline.health import exit_reports
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.between_hosts.peer_waits import patience_with_its_host_s
from paceline.reducer.between_hosts.routes import place_of
from paceline.reducer.plan import Plan
from paceline.torch.communicator.calls import GroupCalls, abort_on_devices, backend_of
from paceline.torch.communicator.find_peers import ProcessGroupPeers
from paceline.torch.communicator.store_exchange import store_of

BACKENDS = ("nccl", "gloo")
"""Supported backends. A host's group has the backend of the process group of all ranks for the device."""

_GROUP_TIMES_OUT_LATER_S = 10.0
_LEAVES_WITHIN_S = 10.0

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, LocalGroup]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LocalGroup:
    process_group: dist.ProcessGroup
    backend: str
    place: int
    size: int
    words: str

    def leave(self) -> None:
        """Shut NCCL down in good order, as torch's destroy_process_group does."""
        for device in self.process_group._device_types:
            backend = self.process_group._get_backend(device)
            end = getattr(backend, "shutdown", None) or getattr(backend, "_shutdown", None)
            if self.backend == "nccl" and end is not None:
                # In a thread, because it waits for the device.
                thread = threading.Thread(target=_try, args=(end,), name="paceline-leave", daemon=True)
                thread.start()
                thread.join(_LEAVES_WITHIN_S)


def _try(end: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # it was shut down before
        end()


def check_devices(
    peers: ProcessGroupPeers, hosts: Sequence[Sequence[int]], devices: Collection[torch.device], owner: str
) -> None:
    """Refuse gradients that cannot be averaged within each host first. Collective, with the same result."""
    kinds = sorted({(device.type, backend_of(peers.process_group, device)) for device in devices})
    facts = {"host": socket.gethostname(), "devices": sorted(map(str, devices)), "kinds": kinds}
    reported = [
        json.loads(row) for row in peers.exchange.all_gather(json.dumps(facts).encode(), peers.timeout_s)
    ]
    if len({len(ranks) for ranks in hosts}) > 1:
        raise _refusal(
            owner,
            expected="as many ranks on each host",
            seen="\n".join(
                f"host {number} ({reported[ranks[0]]['host']}) has {len(ranks)}: {format_ranks(ranks)}"
                for number, ranks in enumerate(hosts)
            ),
        )
    for rank, each in enumerate(reported):
        if len(each["devices"]) != 1:
            where = ", ".join(each["devices"])
            expected = "all parameters of a rank on one device"
            raise _refusal(owner, expected=expected, seen=f"rank {rank} has some on {where}")
        ((kind, backend),) = each["kinds"]
        if [kind, backend] != reported[0]["kinds"][0] or backend not in BACKENDS:
            raise _refusal(
                owner,
                expected="one kind of device, for which the process group has a backend of NCCL or Gloo",
                seen=f"rank {rank} has parameters on {kind}, and for it "
                f"{backend or 'a backend unknown here'}",
            )


def _refusal(owner: str, *, expected: str, seen: str) -> ConfigError:
    return ConfigError(
        f'{owner}: reduce_through="hosts" is not possible here.',
        expected=expected,
        seen=seen,
        hint='leave reduce_through at "auto": gradients on devices go over the process group',
        argument="reduce_through",
    )


def local_group_of(
    peers: ProcessGroupPeers, hosts: Sequence[Sequence[int]], device: torch.device, peer_monitor: PeerMonitor
) -> LocalGroup:
    """The process group of this rank's host for a type of device; the first call creates it.

    Collective, over all ranks.
    """
    made = _groups.setdefault(peers.process_group, {})
    if device.type not in made:
        group = _make(peers, hosts, device)
        exit_reports.before_leaving(group.leave, is_last=True)
        LocalCalls(group, peers, peer_monitor, device).connect()
        made[device.type] = group  # if connect() raised, the next attempt creates another group
    return made[device.type]


def _make(peers: ProcessGroupPeers, hosts: Sequence[Sequence[int]], device: torch.device) -> LocalGroup:
    host, place = place_of(hosts, peers.rank)
    ranks, backend = hosts[host], backend_of(peers.process_group, device)
    # Keys that no other group of these ranks, and no earlier start of them, has used in the user's store.
    nonces = peers.exchange.all_gather(secrets.token_hex(8).encode(), peers.timeout_s)
    keys = f"paceline/within/{nonces[0].decode()}/{host}"
    # Our own waits must time out first: the group's time-out names no rank, and NCCL's ends the process.
    timeout = timedelta(seconds=patience_with_its_host_s(peers.timeout_s) + _GROUP_TIMES_OUT_LATER_S)
    try:
        store = store_of(peers.process_group)
        if store is None:
            raise RuntimeError("the process group was made without a store")
        own = PrefixStore(keys, store)
        group = dist.ProcessGroup(own, place, len(ranks))
        world = dist.get_process_group_ranks(peers.process_group)
        made = _make_backend(backend, own, keys, place, [world[rank] for rank in ranks], timeout)
        kinds = dist.ProcessGroup.BackendType
        kind_of_backend = kinds.NCCL if backend == "nccl" else kinds.GLOO
        group._set_default_backend(kind_of_backend)
        made._set_sequence_number_for_group()
        group._register_backend(torch.device(device.type), kind_of_backend, made)
    except RuntimeError as error:
        raise RendezvousError(
            f"Rank {peers.rank} of {peers.world_size} could not connect to the other ranks of its host.",
            seen=f"{format_ranks(ranks)}\n{str(error).splitlines()[0]}",
            hint='reduce_through="group" averages over the process group alone',
        ) from error
    words = f"torch's {backend} process group of the ranks of host {host} ({format_ranks(ranks)})"
    return LocalGroup(group, backend, place, len(ranks), words)


def _make_backend(
    backend: str, store: PrefixStore, name: str, place: int, world_ranks: list[int], timeout: timedelta
) -> Any:
    """Collective."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, place, len(world_ranks), timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = name  # type: ignore[assignment]
    options.global_ranks_in_group = world_ranks
    return dist.ProcessGroupNCCL(store, place, len(world_ranks), options)


class LocalCalls:
    """One rank's calls over the process group of its host.

    Attributes:
        place: This rank's number in the group.
        size: Number of ranks in the group.
        is_on_streams: Whether calls run on streams of the device, which other streams can wait for.
        waits: How this rank waits, and how failed waits become errors.
    """

    def __init__(
        self,
        group: LocalGroup,
        peers: ProcessGroupPeers,
        peer_monitor: PeerMonitor | None,
        device: torch.device,
        plan: Plan | None = None,
    ) -> None:
        self.place, self.size = group.place, group.size
        self._calls = GroupCalls(group.process_group, peers, peer_monitor, group.words).but(plan=plan)
        self._last_calls = self._calls.but(timeout_s=patience_with_its_host_s(peers.timeout_s))
        self._group = group.process_group
        self._is_gloo = group.backend == "gloo"
        self._device = device
        self.is_on_streams = self._calls.runs_on_streams(device)
        self.waits = self._calls.waits

    def connect(self) -> None:
        """Make the first call, which connects the ranks, so that a failure shows now. Collective."""
        what = "the first call within the host"
        own = torch.zeros(1, device=self._device)
        work = self._calls.begin(lambda: self._group.allreduce([own]), what)
        self._calls.wait(work, what, on_host=True)

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        count = flat.numel() // self.size
        return flat[self.place * count : (self.place + 1) * count]

    def reduce_scatter(self, flat: torch.Tensor, bucket: int) -> dist.Work:
        """Start to sum a bucket over the ranks of the host. Collective.

        In place: afterwards `part_of(flat)` holds sums, and the rest of `flat` is undefined.
        """
        if self._is_gloo:
            # Gloo's own reduce_scatter makes the same call, on a copy, and never reports its completion.
            return self._calls.begin(lambda: self._group.allreduce([flat]), bucket)
        # Not torch's reduce_scatter_tensor, which is deprecated from 2.13 on.
        own, options = self.part_of(flat), dist.ReduceScatterOptions()
        return self._calls.begin(lambda: self._group._reduce_scatter_base(own, flat, options), bucket)

    def all_gather(self, flat: torch.Tensor, bucket: int) -> dist.Work:
        """Start to gather the shards of all ranks of the host on each of them. Collective, in place."""
        own = self.part_of(flat)
        if self._is_gloo:
            rows = list(flat.view(self.size, -1).unbind())
            return self._last_calls.begin(lambda: self._group.allgather([rows], [own]), bucket)
        return self._last_calls.begin(lambda: self._group._allgather_base(flat, own), bucket)

    def wait(self, work: dist.Work, bucket: int, *, is_last: bool = False) -> None:
        """Make the current stream wait for a call; without a stream, this thread waits."""
        calls = self._last_calls if is_last else self._calls
        calls.wait(work, bucket, on_host=not self.is_on_streams, on_device=True)

    def abort(self) -> None:
        """Does not block, not collective."""
        abort_on_devices(self._group)
