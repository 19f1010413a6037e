"""What moves values and gradients between the ranks of one model: memory that they share, or a process group.

See `paceline.reducer.communicator`. The hooks see no difference between the kinds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.errors import ConfigError, RegionError
from paceline.health.peer_monitor import (
    ChannelPeerMonitor,
    HostPeerMonitor,
    MemoryPeerMonitor,
    PeerMonitor,
    Tell,
    report_no_peer_monitor,
    tell_on_host_too,
)
from paceline.reducer.between_hosts.hierarchical import MOST_POINTER_BYTES, Hosts
from paceline.reducer.between_hosts.options import A_HOOK, BetweenHosts, refuse_other_bits
from paceline.reducer.between_hosts.reducers import HostReducers
from paceline.reducer.between_hosts.routes import BUCKET_BYTES, place_of
from paceline.reducer.between_hosts.shares import Place, Shares, plan_of_shares, take_over
from paceline.reducer.between_hosts.sum_formats import CodedSums
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import (
    CORE_DTYPES,
    Communicator,
    Reduction,
    ReductionOptions,
    gather_bytes,
    gather_in_memory,
    make_host_reducer,
)
from paceline.reducer.plan import Plan
from paceline.reducer.process_group import ProcessGroupReducer
from paceline.torch.communicator.broadcast import PreparedBroadcast
from paceline.torch.communicator.calls import GroupCalls
from paceline.torch.communicator.comm_hook import HookTransport
from paceline.torch.communicator.device_copies import DeviceCopies
from paceline.torch.communicator.gradient_buffer import GradientBuffer
from paceline.torch.communicator.hosts import join_hosts, join_partners
from paceline.torch.communicator.local_group import LocalCalls, LocalGroup, check_devices, local_group_of
from paceline.torch.communicator.peers import Peers, ProcessGroupPeers, control_of
from paceline.torch.communicator.share_transport import ShareTransport
from paceline.torch.communicator.transport import ProcessGroupTransport
from paceline.torch.model.inner_tensors import plain_tensors
from paceline.torch.model.parameters import dtype_name

Tensors = Sequence[torch.Tensor]


def connect(
    peers: Peers,
    *,
    on_host: bool,
    reduce_through: str,
    between_hosts: BetweenHosts,
    devices: Collection[torch.device] = (),
) -> Communicator[torch.Tensor]:
    """The best communicator between these ranks. Collective.

    Args:
        peers: The ranks that train the model.
        on_host: Whether all trainable parameters are on the CPU; the same on all ranks.
        reduce_through: "memory", "group", "hosts", or the best of what needs no such wish ("auto"); the same
            on all ranks.
        between_hosts: What is asked of the way between hosts; the same on all ranks.
        devices: Where this rank's gradients lie, if they can go through "hosts".

    Raises:
        ConfigError: That is not possible here.
    """
    if reduce_through == "hosts" and not on_host:
        return _connect_devices(peers, devices, between_hosts)
    tries_memory = on_host and reduce_through != "group"
    memory = peers.share_hosts() if tries_memory else None
    if memory is not None and len(memory.hosts) == 1:
        return MemoryCommunicator(memory.host_group, peers)
    hosts = join_hosts(peers, memory) if memory is not None and reduce_through in ("auto", "hosts") else None
    if hosts is not None:
        assert isinstance(peers, ProcessGroupPeers)
        return HostsCommunicator(
            GroupCommunicator(peers, ChannelPeerMonitor(hosts.control)), peers, hosts, between_hosts
        )
    if memory is not None:
        memory.host_group.close()
    _check_group(peers, on_host, reduce_through, between_hosts.owner)
    if peers.world_size > 1:
        seen = "ranks on several hosts without a Gloo group for the CPU"
        between_hosts.refuse(seen if on_host else "parameters on a GPU")
    assert isinstance(peers, ProcessGroupPeers)
    if memory is None:
        return GroupCommunicator(peers, _find_peer_monitor(peers))
    return GroupCommunicator(peers, ChannelPeerMonitor(control_of(peers, memory.hosts)))


class MemoryCommunicator:
    """A `Communicator` through the memory that all ranks share. The parameters are on the CPU.

    Args:
        core: The memory.
        peers: The ranks; for buffers that are on other devices.

    Attributes:
        core: The memory.
    """

    path, bits = "memory", "world"
    wants_whole_buckets = False
    most_bucket_bytes: int | None = None

    def __init__(self, core: _core.HostGroup, peers: Peers) -> None:
        self.rank, self.world_size = peers.rank, peers.world_size
        self.tell: Tell | None = core.set_activity
        self.peer_monitor: PeerMonitor | None = MemoryPeerMonitor(core)
        self.core = core
        self._peers = peers

    def broadcast(self, tensors: Tensors, root: int = 0) -> None:
        self.prepare_broadcast(tensors)(root)

    def prepare_broadcast(self, tensors: Tensors) -> Callable[[int], None]:
        tensors = plain_tensors(tensors)
        if not all(tensor.is_cpu for tensor in tensors):
            return PreparedBroadcast(tensors, self.rank, self._broadcast)
        return _MemoryBroadcast(self.core, tensors)

    def _broadcast(self, payload: torch.Tensor, root: int) -> None:
        if payload.is_cpu:
            self.core.broadcast(payload.data_ptr(), payload.numel(), root)
        else:
            self._peers.broadcast(payload, root)

    def sum(self, tensor: torch.Tensor) -> None:
        if tensor.is_cpu:
            dtype = CORE_DTYPES[dtype_name(tensor.dtype)]
            self.core.all_reduce(tensor.data_ptr(), tensor.numel(), dtype, ReduceOp.SUM)
        else:
            dist.all_reduce(tensor, group=self._peers.process_group)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return gather_bytes(functools.partial(gather_in_memory, self.core), payload)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Tensors,
        options: ReductionOptions,
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> Reduction[torch.Tensor]:
        reducer = make_host_reducer(self.core, plan, options, instead_of)
        gradient_buffer = GradientBuffer.on_memory(plan, parameters, reducer.buffer_pointer, owner=reducer)
        return Reduction(
            plan, gradient_buffer.views, reducer, most_pointer_bytes=sys.maxsize, owned=options.owned
        )

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[torch.Tensor]:
        return HookCommunicator(self, self._peers, hook)


class _MemoryBroadcast:
    """See `Communicator.prepare_broadcast`; of tensors on the CPU, by their addresses."""

    def __init__(self, core: _core.HostGroup, tensors: Tensors) -> None:
        self._core = core
        with torch.no_grad():
            self._whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        self._copies = [(tensor, copy) for tensor, copy in zip(tensors, self._whole) if copy is not tensor]
        self._pieces = [each.data_ptr() for each in self._whole]
        self._sizes = [each.nbytes for each in self._whole]

    def __call__(self, root: int) -> None:
        with torch.no_grad():
            for tensor, copy in self._copies:
                copy.copy_(tensor)
            self._core.broadcast_all(self._pieces, self._sizes, root)
            for tensor, copy in self._copies:
                tensor.copy_(copy)


class GroupCommunicator:
    """A `Communicator` through a process group of torch.

    Args:
        peers: The ranks of the group.
        peer_monitor: Names ranks that are lost or late; None: nobody does.
    """

    path, bits = "group", "engine"
    wants_whole_buckets = False
    most_bucket_bytes: int | None = None

    def __init__(self, peers: ProcessGroupPeers, peer_monitor: PeerMonitor | None) -> None:
        self.rank, self.world_size = peers.rank, peers.world_size
        self.tell: Tell | None = None if peer_monitor is None else peer_monitor.tell
        self.peer_monitor = peer_monitor
        self._peers = peers
        self._calls = calls = GroupCalls(peers, peer_monitor)
        self._broadcast, self.sum, self.sum_in_order = calls.broadcast, calls.sum, calls.sum_in_order

    def broadcast(self, tensors: Tensors, root: int = 0) -> None:
        self.prepare_broadcast(tensors)(root)

    def prepare_broadcast(self, tensors: Tensors) -> Callable[[int], None]:
        return PreparedBroadcast(tensors, self.rank, self._broadcast)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return gather_bytes(self._calls.gather, payload)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Tensors,
        options: ReductionOptions,
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> Reduction[torch.Tensor]:
        before = None if instead_of is None else (instead_of.plan, instead_of.sections)
        gradient_buffer = GradientBuffer.allocate(plan, parameters, before)
        transport = ProcessGroupTransport(
            gradient_buffer,
            self._peers,
            checks_finite=options.checks_finite,
            waits_for_finite=options.waits_for_finite,
            peer_monitor=self.peer_monitor,
        )
        return _over(
            gradient_buffer, transport, ProcessGroupReducer(plan, transport, skip_unused=options.skip_unused)
        )

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[torch.Tensor]:
        return HookCommunicator(self, self._peers, hook)


class HostsCommunicator:
    """A `Communicator` between several hosts: gradients meet in the memory of each, all else goes over the
    group.

    Args:
        communicator: For all else.
        peers: The ranks.
        hosts: Who is where, and their connections.
        between_hosts: What is asked of the way between them.
    """

    wants_whole_buckets = False
    most_bucket_bytes: int | None = BUCKET_BYTES

    def __init__(
        self,
        communicator: GroupCommunicator,
        peers: ProcessGroupPeers,
        hosts: Hosts,
        between_hosts: BetweenHosts,
    ) -> None:
        self._reducers = HostReducers(hosts, between_hosts)
        self.path, self.bits = "hosts", self._reducers.bits
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.tell = tell_on_host_too(hosts.group, communicator.peer_monitor)
        self.peer_monitor = communicator.peer_monitor
        self.broadcast, self.all_gather = communicator.broadcast, communicator.all_gather
        self.prepare_broadcast = communicator.prepare_broadcast
        self.sum = communicator.sum if between_hosts.deterministic is None else communicator.sum_in_order
        self._communicator, self._peers, self._between_hosts = communicator, peers, between_hosts

    def make_reduction(
        self,
        plan: Plan,
        parameters: Tensors,
        options: ReductionOptions,
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> Reduction[torch.Tensor]:
        reducer = self._reducers.make(plan, options, instead_of)
        if reducer is None:
            self.path, self.bits = self._communicator.path, self._communicator.bits
            return self._communicator.make_reduction(plan, parameters, options)
        gradient_buffer = GradientBuffer.on_memory(
            plan, parameters, reducer.buffer_pointer, owner=reducer.memory
        )
        adopt = None if reducer.codes is None else reducer.adopt_errors
        return Reduction(
            plan, gradient_buffer.views, reducer, most_pointer_bytes=MOST_POINTER_BYTES, adopt_errors=adopt
        )

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[torch.Tensor]:
        self._between_hosts.refuse(A_HOOK)
        return HookCommunicator(self, self._peers, hook)


class DevicesCommunicator:
    """A `Communicator` between several hosts for gradients on devices; all else goes over the group.

    The process group of each host leaves its ranks a share of each bucket, which they exchange.

    Args:
        communicator: For all else.
        peers: The ranks.
        partners: Who exchanges this rank's shares, as hosts of one rank each.
        group: The process group of this rank's host.
        memory: The memory of this rank's host, in which no gradient lies.
        peer_monitor: Names ranks of this host that are lost or late.
        between_hosts: What is asked of the way between hosts.
    """

    path, bits = "hosts", "engine"
    wants_whole_buckets = False
    most_bucket_bytes: int | None = BUCKET_BYTES

    def __init__(
        self,
        communicator: GroupCommunicator,
        peers: ProcessGroupPeers,
        partners: Hosts,
        group: LocalGroup,
        memory: _core.HostGroup,
        peer_monitor: PeerMonitor,
        between_hosts: BetweenHosts,
    ) -> None:
        self._reducers = HostReducers(partners, between_hosts)
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.tell: Tell | None = peer_monitor.tell
        self.peer_monitor = communicator.peer_monitor
        self.broadcast, self.sum, self.all_gather = (
            communicator.broadcast,
            communicator.sum,
            communicator.all_gather,
        )
        self.prepare_broadcast = communicator.prepare_broadcast
        self._communicator, self._peers, self._between_hosts = communicator, peers, between_hosts
        self._partners, self._group, self._of_host = partners, group, peer_monitor
        self._memory = memory
        self._coded: tuple[CodedSums, Plan] | None = None  # those of the latest plan

    def make_reduction(
        self,
        plan: Plan,
        parameters: Tensors,
        options: ReductionOptions,
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> Reduction[torch.Tensor]:
        if instead_of is not None:
            instead_of.reducer.close()
        if not plan.buckets:
            self.path = self._communicator.path
            return self._communicator.make_reduction(plan, parameters, options)
        before = None if instead_of is None else (instead_of.plan, instead_of.sections)
        gradient_buffer = GradientBuffer.allocate(plan, parameters, before)
        device = gradient_buffer.sections[0].device
        calls = LocalCalls(self._group, self._peers, self._of_host, device, plan)
        of_shares = plan_of_shares(plan, self._group.size)
        reducer = self._reducers.make_next(of_shares, None)
        place = Place(self._group.place, self._group.size)
        if reducer.codes is not None:
            if self._coded is not None:
                take_over(*self._coded, reducer.codes, plan, place, self._memory)
            self._coded = reducer.codes, plan
        memory = GradientBuffer.on_memory(of_shares, (), reducer.buffer_pointer, owner=reducer.memory)
        who, num_shares = self._partners.who, len(plan.buckets)
        shares = Shares(
            reducer,
            num_shares,
            who,
            self._peers.timeout_s,
            calls.abort,
            self._of_host,
            None if reducer.codes is None else self._memory,
        )
        transport = ShareTransport(
            gradient_buffer,
            self._peers,
            calls,
            shares,
            [memory.bucket(number) for number in range(num_shares)],
            len(self._partners.ranks),
            DeviceCopies(device),
            checks_finite=options.checks_finite,
            waits_for_finite=options.waits_for_finite,
            peer_monitor=self.peer_monitor,
        )
        adopt = None if reducer.codes is None else functools.partial(shares.adopt_errors, plan, place)
        return _over(gradient_buffer, transport, ProcessGroupReducer(plan, transport, beside=shares), adopt)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[torch.Tensor]:
        self._between_hosts.refuse(A_HOOK)
        return HookCommunicator(self._communicator, self._peers, hook)


class HookCommunicator:
    """A `Communicator` that gives buckets to a user's hook, and leaves all else to another communicator.

    Args:
        communicator: The other one.
        peers: The ranks of a process group, which the hook uses.
        hook: Averages buckets, which hold whole parameters.
    """

    path, bits = "group", "engine"
    wants_whole_buckets = True
    most_bucket_bytes: int | None = None

    def __init__(self, communicator: Communicator[torch.Tensor], peers: Peers, hook: CommHook) -> None:
        self.rank, self.world_size, self.peer_monitor = (
            communicator.rank,
            communicator.world_size,
            communicator.peer_monitor,
        )
        self.tell: Tell | None = None if communicator.peer_monitor is None else communicator.peer_monitor.tell
        self.broadcast, self.sum, self.all_gather = (
            communicator.broadcast,
            communicator.sum,
            communicator.all_gather,
        )
        self.prepare_broadcast = communicator.prepare_broadcast
        self.with_hook = communicator.with_hook
        self._peers = peers
        self._hook = hook

    def make_reduction(
        self,
        plan: Plan,
        parameters: Tensors,
        options: ReductionOptions,
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> Reduction[torch.Tensor]:
        """In memory of its own: a hook's gradient buffer has no gaps, and so another size than any other."""
        assert isinstance(self._peers, ProcessGroupPeers)
        if instead_of is not None:
            instead_of.reducer.close()
        gradient_buffer, finite = GradientBuffer.allocate(plan, parameters), options.checks_finite
        transport = HookTransport(
            gradient_buffer,
            self._peers,
            parameters,
            self._hook,
            checks_finite=finite,
            peer_monitor=self.peer_monitor,
        )
        return _over(gradient_buffer, transport, ProcessGroupReducer(plan, transport), transport.shown.end)


def _over(
    gradient_buffer: GradientBuffer,
    transport: ProcessGroupTransport,
    reducer: ProcessGroupReducer,
    adopt_errors: Callable[[Collection[int] | None], None] | None = None,
) -> Reduction[torch.Tensor]:
    return Reduction(
        gradient_buffer.plan,
        gradient_buffer.views,
        reducer,
        most_pointer_bytes=MOST_POINTER_BYTES if transport.pointers else 0,
        sections=gradient_buffer.sections,
        waiting=gradient_buffer.waiting,
        order=reducer.order,
        adopt_errors=adopt_errors,
    )


def _connect_devices(
    peers: Peers, devices: Collection[torch.device], between_hosts: BetweenHosts
) -> Communicator[torch.Tensor]:
    """The communicator for reduce_through="hosts" and parameters on devices. Collective; see `connect`."""
    owner = between_hosts.owner
    _check_group(peers, False, "hosts", owner)
    assert isinstance(peers, ProcessGroupPeers)
    refuse_other_bits(
        owner, between_hosts.deterministic, "parameters on a GPU, which its process group adds up"
    )
    if peers.world_size == 1:
        return GroupCommunicator(peers, _find_peer_monitor(peers))
    memory = peers.share_hosts()
    if len(memory.hosts) == 1:
        return GroupCommunicator(peers, MemoryPeerMonitor(memory.host_group))
    check_devices(peers, memory.hosts, devices, owner)
    control = control_of(peers, memory.hosts)
    (device,) = devices
    of_all = ChannelPeerMonitor(control)
    of_host = HostPeerMonitor(of_all, memory.host_group, memory.hosts[place_of(memory.hosts, peers.rank)[0]])
    group = local_group_of(peers, memory.hosts, device, of_host)
    partners = join_partners(peers, memory.hosts, control)
    communicator = GroupCommunicator(peers, of_all)
    return DevicesCommunicator(
        communicator, peers, partners, group, memory.host_group, of_host, between_hosts
    )


def _find_peer_monitor(peers: ProcessGroupPeers) -> PeerMonitor | None:
    """Memory of all ranks in which no gradient lies, or the channel of several hosts. Collective."""
    try:
        memory = peers.share_hosts()
    except RegionError as error:  # on every rank; gradients need none of it
        report_no_peer_monitor(error, peers.rank)
        return None
    core = memory.of_all_ranks()
    return ChannelPeerMonitor(control_of(peers, memory.hosts)) if core is None else MemoryPeerMonitor(core)


def _check_group(peers: Peers, on_host: bool, reduce_through: str, owner: str) -> None:
    """Without shared memory, the ranks need a process group of torch."""
    if reduce_through == "memory":
        raise ConfigError(
            f'{owner}: reduce_through="memory" is not possible here.',
            seen="parameters on a GPU" if not on_host else "ranks on several hosts",
            hint='leave reduce_through at "auto"',
        )
    if reduce_through == "hosts" and on_host:
        raise ConfigError(
            f'{owner}: reduce_through="hosts" is not possible here.',
            seen="ranks on several hosts, and a process group without a Gloo backend for the CPU",
            expected='a process group of "gloo", or of "cpu:gloo" and others',
            hint='leave reduce_through at "auto"',
        )
    if not isinstance(peers, ProcessGroupPeers):
        raise ConfigError(
            f"{owner}: a paceline.Group works in host memory only.",
            seen="parameters on a GPU" if not on_host else f"reduce_through={reduce_through!r}",
            hint='call torch.distributed.init_process_group("nccl" or "gloo") first',
        )


def average_buffers(
    communicator: Communicator[torch.Tensor], buffers: Sequence[torch.Tensor], active: Sequence[int]
) -> None:
    """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective.

    Autograd does not notice; `WrittenBuffers` lets it know.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for buffer in plain_tensors(buffers):
        wide = torch.float64 if buffer.dtype is torch.float64 else torch.float32
        kinds.setdefault((buffer.device, wide), []).append(buffer)
    with torch.no_grad():
        for (_, dtype), group in kinds.items():
            flat = torch.cat([buffer.detach().to(dtype).flatten() for buffer in group])
            if communicator.rank not in active:
                flat.zero_()
            communicator.sum(flat)
            flat /= len(active)
            means = torch.split(flat, [buffer.numel() for buffer in group])
            for buffer, mean in zip(group, means):
                buffer.data.copy_(mean.view(buffer.shape))
