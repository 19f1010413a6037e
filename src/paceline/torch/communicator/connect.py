"""Creates the communicator of a torch model; also the one between hosts, for gradients on devices."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from paceline import _core
from paceline.health.peer_monitor import (
    ChannelSource,
    MemorySource,
    PeerMonitor,
)
from paceline.reducer.between_hosts import choose_communicator
from paceline.reducer.between_hosts.choose_communicator import check_group
from paceline.reducer.between_hosts.compressed_sums import CodedSums
from paceline.reducer.between_hosts.device_shards import DeviceShards, Place, plan_of_shards, take_over
from paceline.reducer.between_hosts.hierarchical import Hosts
from paceline.reducer.between_hosts.hosts_communicator import HostReducers
from paceline.reducer.between_hosts.options import A_HOOK, BetweenHosts, refuse_other_bits
from paceline.reducer.between_hosts.routes import BUCKET_BYTES, place_of
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import (
    BesideCommunicator,
    Communicator,
    GroupCommunicator,
    Reduction,
    ReductionOptions,
    over_group,
)
from paceline.reducer.plan import Plan
from paceline.reducer.process_group import ProcessGroupReducer
from paceline.torch.communicator.calls import GroupCalls
from paceline.torch.communicator.device_shard_transport import DeviceShardTransport
from paceline.torch.communicator.find_peers import Peers, ProcessGroupPeers
from paceline.torch.communicator.hosts import join_hosts, join_peers
from paceline.torch.communicator.local_group import LocalCalls, LocalGroup, check_devices, local_group_of
from paceline.torch.communicator.pinned_copies import DeviceCopies
from paceline.torch.ops import OPS


def connect(
    peers: Peers,
    *,
    on_host: bool,
    reduce_through: str,
    between_hosts: BetweenHosts,
    devices: Collection[torch.device] = (),
) -> Communicator[torch.Tensor]:
    if reduce_through == "hosts" and not on_host:
        return _connect_devices(peers, devices, between_hosts)

    def calls_of_hooks(core: _core.HostGroup) -> GroupCalls:
        assert isinstance(peers, ProcessGroupPeers)  # register_comm_hook() has checked it
        peers.calls.peer_monitor = PeerMonitor(MemorySource(core))
        return peers.calls

    return choose_communicator.connect(
        peers,
        OPS,
        owner=between_hosts.owner,
        on_host=on_host,
        reduce_through=reduce_through,
        between_hosts=between_hosts,
        join_hosts=functools.partial(join_hosts, peers),
        why_not_joined="ranks on several hosts without a Gloo group for the CPU",
        calls_of_hooks=calls_of_hooks,
    )


def _connect_devices(
    peers: Peers, devices: Collection[torch.device], between_hosts: BetweenHosts
) -> Communicator[torch.Tensor]:
    """Collective; see `connect`."""
    owner = between_hosts.owner
    check_group(peers, OPS, owner, on_host=False, reduce_through="hosts")
    assert isinstance(peers, ProcessGroupPeers)
    refuse_other_bits(
        owner, between_hosts.deterministic, "parameters on a GPU, which its process group adds up"
    )
    memory = peers.share_hosts()
    if len(memory.hosts) == 1:
        peers.calls.peer_monitor = PeerMonitor(MemorySource(memory.host_group))
        return GroupCommunicator(peers.calls, OPS)
    check_devices(peers, memory.hosts, devices, owner)
    control = peers.channel(memory.hosts)
    (device,) = devices
    peers.calls.peer_monitor = PeerMonitor(ChannelSource(control))
    ranks = memory.hosts[place_of(memory.hosts, peers.rank)[0]]
    of_host = PeerMonitor(ChannelSource(control), MemorySource(memory.host_group, ranks))
    group = local_group_of(peers, memory.hosts, device, of_host)
    hosts = join_peers(peers, memory.hosts, control)
    communicator = GroupCommunicator(peers.calls, OPS)
    return DevicesCommunicator(communicator, peers, hosts, group, memory.host_group, of_host, between_hosts)


class DevicesCommunicator(BesideCommunicator[torch.Tensor]):
    """A `Communicator` between several hosts for gradients on devices.

    A reduce-scatter within each host leaves every rank a shard of each bucket, and ranks exchange their
    shards between the hosts. Everything else goes over the process group of all ranks.
    """

    path, bits = "hosts", "engine"
    most_bucket_bytes: int | None = BUCKET_BYTES

    def __init__(
        self,
        communicator: GroupCommunicator[torch.Tensor],
        peers: ProcessGroupPeers,
        hosts: Hosts,
        group: LocalGroup,
        memory: _core.HostGroup,
        peer_monitor: PeerMonitor,
        between_hosts: BetweenHosts,
    ) -> None:
        super().__init__(communicator)
        self._reducers = HostReducers(hosts, between_hosts)
        self.publish = peer_monitor.publish
        self._communicator, self._peers, self._between_hosts = communicator, peers, between_hosts
        self._hosts, self._group, self._of_host = hosts, group, peer_monitor
        self._memory = memory
        self._coded: tuple[CodedSums, Plan] | None = None  # of the latest plan

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[torch.Tensor],
        options: ReductionOptions,
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> Reduction[torch.Tensor]:
        if instead_of is not None:
            instead_of.reducer.close()
        if not plan.buckets:
            self.path = self._communicator.path
            return self._communicator.make_reduction(plan, parameters, options)
        gradient_buffer = OPS.allocate(plan, parameters, instead_of)
        device = gradient_buffer.sections[0].device
        calls = LocalCalls(self._group, self._peers, self._of_host, device, plan)
        of_shards = plan_of_shards(plan, self._group.size)
        reducer = self._reducers.make_next(of_shards, None)
        place = Place(self._group.place, self._group.size)
        if reducer.codes is not None:
            if self._coded is not None:
                take_over(*self._coded, reducer.codes, plan, place, self._memory)
            self._coded = reducer.codes, plan
        memory = OPS.buffer_at(of_shards, (), reducer.buffer_pointer, reducer.memory)
        who, num_shards = self._hosts.who, len(plan.buckets)
        shards = DeviceShards(
            reducer,
            num_shards,
            who,
            self._peers.timeout_s,
            calls.abort,
            self._of_host,
            None if reducer.codes is None else self._memory,
        )
        transport = DeviceShardTransport(
            gradient_buffer,
            self._peers.calls,
            options,
            calls,
            shards,
            [memory.bucket(number) for number in range(num_shards)],
            len(self._hosts.ranks),
            DeviceCopies(device),
        )
        adopt = None if reducer.codes is None else functools.partial(shards.adopt_errors, plan, place)
        reducer_of_all = ProcessGroupReducer(plan, transport, beside=shards)
        return over_group(gradient_buffer, transport, reducer_of_all, adopt)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[torch.Tensor]:
        self._between_hosts.refuse(A_HOOK)
        return self._communicator.with_hook(hook, process_group)
