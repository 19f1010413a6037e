"""What moves values and gradients between the ranks of one model.

See `paceline.reducer.communicator`: the memory that the ranks of one host share and a group of
paddle.distributed do the same few things, so that nothing above knows which it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import paddle

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.health.peer_monitor import MemoryPeerMonitor, PeerMonitor, Tell, tell_on_host_too
from paceline.paddle import internals
from paceline.paddle.communicator.calls import GroupCalls, MemoryCalls
from paceline.paddle.communicator.comm_hook import BucketHook
from paceline.paddle.communicator.gradient_buffer import GradientBuffer, shared_places
from paceline.paddle.communicator.transport import PaddleTransport
from paceline.paddle.model.parameters import dtype_name, nbytes
from paceline.reducer import communicator as common
from paceline.reducer.between_hosts.hierarchical import MOST_POINTER_BYTES, Hosts
from paceline.reducer.between_hosts.options import A_HOOK, BetweenHosts
from paceline.reducer.between_hosts.reducers import HostReducers
from paceline.reducer.between_hosts.routes import BUCKET_BYTES
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import (
    CORE_DTYPES,
    Reduction,
    ReductionOptions,
    gather_bytes,
    gather_in_memory,
    make_host_reducer,
    pack,
    sum_rows,
)
from paceline.reducer.plan import Plan
from paceline.reducer.process_group import ProcessGroupReducer


class Communicator(common.Communicator[paddle.Tensor], Protocol):
    """A `Communicator` that gathers arrays, too."""

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Arrays of all ranks, by rank, of one shape and dtype. Collective."""
        ...

    def sum(self, tensor: paddle.Tensor, timeout_s: float | None = None) -> None:
        """See `paceline.reducer.communicator.Communicator`. `timeout_s`: most seconds of this wait; None: as
        of all.
        """
        ...

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator:
        """See `paceline.reducer.communicator.Communicator`."""
        ...


class MemoryCommunicator:
    """A `Communicator` through the memory that all ranks share. Tensors are on the CPU.

    Args:
        core: The memory.
        owner: Keeps it.

    Attributes:
        core: The memory.
    """

    path, bits = "memory", "world"
    wants_whole_buckets = False
    most_bucket_bytes: int | None = None

    def __init__(self, core: _core.HostGroup, owner: object) -> None:
        self.rank, self.world_size = core.rank, core.world_size
        self.tell: Tell | None = core.set_activity
        self.peer_monitor: PeerMonitor | None = MemoryPeerMonitor(core)
        self.gather = functools.partial(gather_in_memory, core)
        self.core = core
        self._owner = owner

    def prepare_broadcast(self, tensors: Sequence[paddle.Tensor]) -> Callable[[int], None]:
        return functools.partial(self.broadcast, tensors)

    def broadcast(self, tensors: Sequence[paddle.Tensor], root: int = 0) -> None:
        filled = [tensor for tensor in tensors if tensor.size]
        with paddle.no_grad():
            whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in filled]
            pieces = [flat.data_ptr() for flat in whole]
            sizes = [nbytes(flat) for flat in whole]
            self.core.broadcast_all(pieces, sizes, root)
            for tensor, flat in zip(filled, whole):
                if flat is not tensor:
                    paddle.assign(flat, tensor)

    def sum(self, tensor: paddle.Tensor, timeout_s: float | None = None) -> None:
        dtype = CORE_DTYPES[dtype_name(tensor.dtype)]
        limit_s = -1.0 if timeout_s is None else timeout_s
        self.core.all_reduce(tensor.data_ptr(), int(tensor.size), dtype, ReduceOp.SUM, timeout_s=limit_s)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return gather_bytes(self.gather, payload)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[paddle.Tensor],
        options: ReductionOptions,
        instead_of: Reduction[paddle.Tensor] | None = None,
    ) -> Reduction[paddle.Tensor]:
        reducer = make_host_reducer(self.core, plan, options, instead_of)
        places = shared_places(plan, parameters, reducer.buffer_pointer, reducer)
        return Reduction(plan, places, reducer, most_pointer_bytes=sys.maxsize, owned=options.owned)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator:
        return HookCommunicator(self, MemoryCalls(self.core), hook, process_group)


class GroupCommunicator:
    """A `Communicator` through a group of paddle.distributed.

    Args:
        calls: On the group.
    """

    path, bits = "group", "engine"
    wants_whole_buckets = False
    most_bucket_bytes: int | None = None

    def __init__(self, calls: GroupCalls) -> None:
        self.rank, self.world_size = calls.rank, calls.world_size
        self.peer_monitor = peer_monitor = calls.peer_monitor
        self.tell: Tell | None = None if peer_monitor is None else peer_monitor.tell
        self._calls = calls

    def prepare_broadcast(self, tensors: Sequence[paddle.Tensor]) -> Callable[[int], None]:
        return functools.partial(self.broadcast, tensors)

    def broadcast(self, tensors: Sequence[paddle.Tensor], root: int = 0) -> None:
        with paddle.no_grad():
            wires = [(tensor, self._calls.to_wire(_as_bytes(tensor))) for tensor in tensors if tensor.size]
            for run in pack(int(wire.size) for _, wire in wires):
                self._broadcast_piece([wires[index][1] for index in run], root)
            for tensor, wire in wires:
                if wire.data_ptr() != tensor.data_ptr():
                    _copy(internals.from_bytes(wire, tensor.dtype).reshape(tensor.shape), tensor)

    def _broadcast_piece(self, piece: list[paddle.Tensor], root: int) -> None:
        packed = piece[0] if len(piece) == 1 else paddle.concat(piece)
        self._calls.complete(lambda: self._calls.broadcast(packed, root), "a broadcast of values")
        if packed is not piece[0]:
            begin = 0
            for each in piece:  # paddle.split() of Paddle 3.2 warns of torch's function of this name
                end = begin + int(each.size)
                paddle.assign(packed[begin:end], each)
                begin = end

    def sum(self, tensor: paddle.Tensor, timeout_s: float | None = None) -> None:
        wire = self._calls.to_wire(tensor)
        self._calls.complete(lambda: self._calls.all_reduce(wire), "a sum of values", timeout_s)
        if wire is not tensor:
            _copy(wire, tensor)

    def sum_in_order(self, tensor: paddle.Tensor, timeout_s: float | None = None) -> None:
        """As `sum`, with the bits of a sum in the memory of one host, for what is small. Collective."""
        rows = self._calls.gather(tensor.numpy(), "a sum of values in the order of ranks", timeout_s)
        _copy(paddle.to_tensor(sum_rows(rows)), tensor)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._calls.gather(array, "rows of sparse gradients")

    def all_gather(self, payload: bytes) -> list[bytes]:
        return gather_bytes(self.gather, payload)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[paddle.Tensor],
        options: ReductionOptions,
        instead_of: Reduction[paddle.Tensor] | None = None,
    ) -> Reduction[paddle.Tensor]:
        return _over(self._calls, GradientBuffer(plan, parameters), options)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator:
        return HookCommunicator(self, self._calls, hook, process_group)


class HostsCommunicator:
    """A `Communicator` between several hosts: gradients meet in the memory of each, all else goes over the
    group.

    Args:
        communicator: For all else.
        calls: Between all ranks, for a hook.
        hosts: Who is where, and their connections.
        between_hosts: What is asked of the way between them.
    """

    wants_whole_buckets = False
    most_bucket_bytes: int | None = BUCKET_BYTES

    def __init__(
        self, communicator: GroupCommunicator, calls: GroupCalls, hosts: Hosts, between_hosts: BetweenHosts
    ) -> None:
        self._reducers = HostReducers(hosts, between_hosts)
        self.path, self.bits = "hosts", self._reducers.bits
        self.rank, self.world_size, self.peer_monitor = (
            communicator.rank,
            communicator.world_size,
            communicator.peer_monitor,
        )
        self.tell = tell_on_host_too(hosts.group, communicator.peer_monitor)
        self.broadcast, self.all_gather, self.gather = (
            communicator.broadcast,
            communicator.all_gather,
            communicator.gather,
        )
        self.prepare_broadcast = communicator.prepare_broadcast
        self.sum = communicator.sum if between_hosts.deterministic is None else communicator.sum_in_order
        self._communicator, self._calls, self._between_hosts = communicator, calls, between_hosts

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[paddle.Tensor],
        options: ReductionOptions,
        instead_of: Reduction[paddle.Tensor] | None = None,
    ) -> Reduction[paddle.Tensor]:
        reducer = self._reducers.make(plan, options, instead_of)
        if reducer is not None:
            places = shared_places(plan, parameters, reducer.buffer_pointer, reducer.memory)
            adopt = None if reducer.codes is None else reducer.adopt_errors
            return Reduction(plan, places, reducer, most_pointer_bytes=MOST_POINTER_BYTES, adopt_errors=adopt)
        self.path, self.bits = self._communicator.path, self._communicator.bits
        return self._communicator.make_reduction(plan, parameters, options)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator:
        self._between_hosts.refuse(A_HOOK)
        return HookCommunicator(self, self._calls, hook, process_group)


class HookCommunicator:
    """A `Communicator` that gives buckets to a user's hook, and leaves all else to another communicator.

    Args:
        communicator: The other one.
        calls: Between the same ranks, for the hook.
        hook: Averages buckets, which hold whole parameters.
        process_group: The process group of the wrapped model, for the hook.
    """

    path, bits = "group", "engine"
    wants_whole_buckets = True
    most_bucket_bytes: int | None = None

    def __init__(
        self, communicator: Communicator, calls: GroupCalls, hook: CommHook, process_group: Any
    ) -> None:
        self.rank, self.world_size, self.tell = communicator.rank, communicator.world_size, communicator.tell
        self.peer_monitor = communicator.peer_monitor
        self.broadcast, self.sum, self.all_gather = (
            communicator.broadcast,
            communicator.sum,
            communicator.all_gather,
        )
        self.prepare_broadcast = communicator.prepare_broadcast
        self.gather, self.with_hook = communicator.gather, communicator.with_hook
        self._calls = calls
        self._hook = hook
        self._process_group = process_group

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[paddle.Tensor],
        options: ReductionOptions,
        instead_of: Reduction[paddle.Tensor] | None = None,
    ) -> Reduction[paddle.Tensor]:
        if instead_of is not None:
            instead_of.reducer.close()
        gradient_buffer = GradientBuffer(plan, parameters)
        hook = BucketHook(self._hook, gradient_buffer, parameters, self._calls, self._process_group)
        return _over(self._calls, gradient_buffer, options, hook)


def average_buffers(
    through: common.Communicator[paddle.Tensor], buffers: Sequence[paddle.Tensor], active: Sequence[int]
) -> None:
    """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective."""
    with paddle.no_grad():
        for buffer in buffers:
            dtype = "float64" if buffer.dtype == paddle.float64 else "float32"
            wide = buffer.astype(dtype).contiguous() * float(through.rank in active)
            through.sum(wide)
            paddle.assign((wide / len(active)).astype(buffer.dtype), buffer)


def _over(
    calls: GroupCalls,
    gradient_buffer: GradientBuffer,
    options: ReductionOptions,
    hook: BucketHook | None = None,
) -> Reduction[paddle.Tensor]:
    transport = PaddleTransport(gradient_buffer, calls, checks_finite=options.checks_finite, hook=hook)
    reducer = ProcessGroupReducer(gradient_buffer.plan, transport, skip_unused=options.skip_unused)
    adopt = None if hook is None else hook.shown.end
    return Reduction(
        gradient_buffer.plan,
        gradient_buffer.places,
        reducer,
        most_pointer_bytes=0,
        order=reducer.order,
        adopt_errors=adopt,
    )


def _copy(source: paddle.Tensor, target: paddle.Tensor) -> None:
    if internals.same_place(source.place, target.place):
        paddle.assign(source, target)
    else:
        target.copy_(source, True)


def _as_bytes(tensor: paddle.Tensor) -> paddle.Tensor:
    """The tensor's own memory as flat bytes, or a copy of it."""
    whole = tensor.detach().contiguous().reshape([-1])
    # Paddle counts the offset of a part of a larger tensor in elements of the new type.
    return paddle.view(whole.clone() if whole.offset else whole, "uint8")
