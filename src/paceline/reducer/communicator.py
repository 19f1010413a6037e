"""Communicators, which move values and gradients between the ranks of one model."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.health.peer_monitor import MemorySource, PeerMonitor, Publish
from paceline.reducer.call_order import CallOrder
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.framework_ops import FrameworkOps, Tensor, dtype_name, nbytes, numel
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.owners import Ranges
from paceline.reducer.plan import Plan
from paceline.reducer.process_group import ProcessGroupReducer, Transport
from paceline.reducer.process_group_calls import ProcessGroupCalls
from paceline.reducer.reducer_interface import Reducer
from paceline.reducer.sum_order import join_in_order

CORE_DTYPES = {name: _core.DTYPES[name] for name in ("float32", "float64", "float16", "bfloat16")}
"""The dtypes of gradients that the core averages."""
MOST_POINTER_BYTES = 256 << 10
"""The largest gradient that a reducer in Python copies to the gradient buffer and back. Larger ones are
copied by the framework, with all its threads."""


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are to be averaged.

    Attributes:
        gradients_in_buffer: Whether gradients live in the gradient buffer. Ignored over a process group.
        checks_finite: Whether to look for infinities and NaNs. In shared memory this costs nothing, and is
            always done.
        skip_unused: Whether to skip buckets that no rank used in the last backward. In shared memory this has
            no effect, because nothing is sent.
        owned: Which rank needs which range of each parameter's mean, in the plan's order; empty: all ranks
            need all. In shared memory only.
        waits_for_finite: Whether to report infinities in the backward that has them, even if this means to
            wait for a device.
    """

    gradients_in_buffer: bool
    checks_finite: bool
    skip_unused: bool
    owned: tuple[Ranges, ...] = ()
    waits_for_finite: bool = True


@dataclass(frozen=True)
class Reduction(Generic[Tensor]):
    """The gradient buffer of a plan, with the reducer that averages it; made anew whenever the plan changes.

    Attributes:
        plan: The plan of the gradient buffer.
        places: Each parameter's place in the gradient buffer, by index.
        reducer: Averages the places over the ranks.
        most_pointer_bytes: The largest gradient that the reducer itself copies to its place, with its mean
            back. The framework copies larger ones, with all its threads.
        sections: Memory of the gradient buffer that another plan of the same parameters may reuse.
        waiting: Gradients, by parameter, that are copied to their places when their bucket is complete; None:
            gradients are copied one by one.
        order: The order in which the backward passes of all models make their calls over a process group that
            pairs calls of different ranks by their order; None: calls are not paired by order.
        owned: Which rank gets which range of each mean; empty: all ranks get all.
        adopt_errors: Called at the end of each backward if gradients are encoded, with the parameters that no
            rank used: the encoding errors of all others are added to the next gradients. Called with None if
            the backward was not good on all ranks; then its errors are dropped. None: nothing is encoded.
    """

    plan: Plan
    places: Sequence[Tensor]
    reducer: Reducer
    most_pointer_bytes: int
    sections: Sequence[Tensor] = ()
    waiting: dict[int, Tensor] | None = None
    order: CallOrder | None = None
    owned: tuple[Ranges, ...] = ()
    adopt_errors: Callable[[Collection[int] | None], None] | None = None


class Communicator(ABC, Generic[Tensor]):
    """Connects the ranks of one model. Its methods are collective, except for `publish` and `with_hook`.

    Attributes:
        path: Where gradients are averaged: "memory", "hosts" (within each, and then between them) or "group";
            a hook counts as a group.
        peer_monitor: Names lost and late ranks if calls go over a process group; or None.
        bits: Which runs give gradients with the same bits; see `WrappedModel.bits`.
        wants_whole_buckets: Whether a bucket must hold whole parameters, for a hook to read.
        publish: Publishes what this rank does, for other ranks' error messages; None: there is no way to.
        most_bucket_bytes: The largest bucket, whatever the model requests; None: there is no limit.
    """

    path: str
    bits: str
    rank: int
    world_size: int
    peer_monitor: PeerMonitor | None
    publish: Publish | None
    wants_whole_buckets = False
    most_bucket_bytes: int | None = None

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Replace the values of `tensors` by those of the rank `root`."""
        self.prepare_broadcast(tensors)(root)

    @abstractmethod
    def prepare_broadcast(self, tensors: Sequence[Tensor]) -> Callable[[int], None]:
        """Prepare to broadcast these tensors repeatedly. Not collective."""

    @abstractmethod
    def sum(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """Replace a contiguous tensor of float32 or float64 by its sum over the ranks."""

    @abstractmethod
    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Arrays of all ranks, by rank, of equal shape and dtype."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Payloads of all ranks, by rank, of any lengths."""
        return gather_bytes(self.gather, payload)

    @abstractmethod
    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[Tensor],
        options: ReductionOptions,
        instead_of: Reduction[Tensor] | None = None,
    ) -> Reduction[Tensor]:
        """A gradient buffer for this plan, filled with zeros, and the reducer that averages it."""

    @abstractmethod
    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[Tensor]:
        """A communicator that gives buckets to a user's hook, and otherwise acts as this one."""


class MemoryCommunicator(Communicator[Tensor]):
    """A `Communicator` over the shared memory of all ranks. The parameters are on the CPU."""

    path, bits = "memory", "world"

    def __init__(
        self,
        core: _core.HostGroup,
        ops: FrameworkOps[Tensor],
        calls_of_hooks: Callable[[_core.HostGroup], ProcessGroupCalls[Tensor]] | None = None,
    ) -> None:
        self.rank, self.world_size = core.rank, core.world_size
        self.publish: Publish | None = core.set_activity
        self.peer_monitor: PeerMonitor | None = PeerMonitor(MemorySource(core))
        self.core = core
        self._ops, self._calls_of_hooks = ops, calls_of_hooks

    def prepare_broadcast(self, tensors: Sequence[Tensor]) -> Callable[[int], None]:
        return _MemoryBroadcast(self.core, self._ops, tensors)

    def sum(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        on_host = self._ops.on_host(tensor)
        limit_s = -1.0 if timeout_s is None else timeout_s
        dtype = CORE_DTYPES[dtype_name(on_host)]
        self.core.all_reduce(on_host.data_ptr(), numel(on_host), dtype, ReduceOp.SUM, timeout_s=limit_s)
        if on_host is not tensor:
            self._ops.copy(on_host, tensor)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty((self.world_size, *array.shape), array.dtype)
        if array.nbytes:
            self.core.all_gather(array.ctypes.data, out.ctypes.data, array.nbytes)
        return out

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[Tensor],
        options: ReductionOptions,
        instead_of: Reduction[Tensor] | None = None,
    ) -> Reduction[Tensor]:
        reducer = make_host_reducer(self.core, plan, options, instead_of)
        places = self._ops.places_at(plan, parameters, reducer.buffer_pointer, reducer)
        return Reduction(plan, places, reducer, most_pointer_bytes=sys.maxsize, owned=options.owned)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[Tensor]:
        assert self._calls_of_hooks is not None
        return HookCommunicator(self, self._calls_of_hooks(self.core), self._ops, hook, process_group)


class _MemoryBroadcast(Generic[Tensor]):
    def __init__(self, core: _core.HostGroup, ops: FrameworkOps[Tensor], tensors: Sequence[Tensor]) -> None:
        self._core, self._copy = core, ops.copy
        tensors = ops.plain_tensors(tensors)
        self._on_host = [ops.on_host(tensor) for tensor in tensors]
        self._copies = [(tensor, copy) for tensor, copy in zip(tensors, self._on_host) if copy is not tensor]
        self._pieces = [each.data_ptr() for each in self._on_host]
        self._sizes = [nbytes(each) for each in self._on_host]

    def __call__(self, root: int) -> None:
        for tensor, copy in self._copies:
            self._copy(tensor, copy)
        self._core.broadcast_all(self._pieces, self._sizes, root)
        for tensor, copy in self._copies:
            self._copy(copy, tensor)


class GroupCommunicator(Communicator[Tensor]):
    path, bits = "group", "engine"

    def __init__(self, calls: ProcessGroupCalls[Tensor], ops: FrameworkOps[Tensor]) -> None:
        self.rank, self.world_size = calls.rank, calls.world_size
        self.peer_monitor = calls.peer_monitor
        self.publish: Publish | None = None if self.peer_monitor is None else self.peer_monitor.publish
        self._calls, self._ops = calls, ops

    def prepare_broadcast(self, tensors: Sequence[Tensor]) -> Callable[[int], None]:
        return self._calls.prepare_broadcast(tensors)

    def sum(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        self._calls.sum(tensor, timeout_s)

    def sum_in_order(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """As `sum`, with the bits of a sum in the memory of one host. Collective.

        Every rank receives the tensors of all ranks, so this is only for small ones.
        """
        calls, what = self._calls, "a sum of values in the order of ranks"
        calls = calls if timeout_s is None else calls.but(timeout_s=timeout_s)
        rows = calls.gather(self._ops.as_array(tensor), what)
        self._ops.copy(self._ops.from_array(sum_rows(rows)), tensor)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._calls.gather(array)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[Tensor],
        options: ReductionOptions,
        instead_of: Reduction[Tensor] | None = None,
    ) -> Reduction[Tensor]:
        gradient_buffer = self._ops.allocate(plan, parameters, instead_of)
        transport = self._calls.make_transport(gradient_buffer, options)
        reducer = ProcessGroupReducer(plan, transport, skip_unused=options.skip_unused)
        return over_group(gradient_buffer, transport, reducer)

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[Tensor]:
        return self.hooked_into(self, hook, process_group)

    def hooked_into(
        self, communicator: Communicator[Tensor], hook: CommHook, process_group: Any
    ) -> Communicator[Tensor]:
        return HookCommunicator(communicator, self._calls, self._ops, hook, process_group)


class BesideCommunicator(Communicator[Tensor]):
    """A `Communicator` that averages gradients in its own way, and leaves all else to another one."""

    def __init__(self, other: Communicator[Tensor]) -> None:
        self.rank, self.world_size = other.rank, other.world_size
        self.peer_monitor = other.peer_monitor
        self.publish: Publish | None = None if self.peer_monitor is None else self.peer_monitor.publish
        self._other = other

    def prepare_broadcast(self, tensors: Sequence[Tensor]) -> Callable[[int], None]:
        return self._other.prepare_broadcast(tensors)

    def sum(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        self._other.sum(tensor, timeout_s)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._other.gather(array)


class HookCommunicator(BesideCommunicator[Tensor]):
    path, bits = "group", "engine"
    wants_whole_buckets = True

    def __init__(
        self,
        other: Communicator[Tensor],
        calls: ProcessGroupCalls[Tensor],
        ops: FrameworkOps[Tensor],
        hook: CommHook,
        process_group: Any,
    ) -> None:
        super().__init__(other)
        self._calls, self._ops = calls, ops
        self._hook, self._process_group = hook, process_group

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[Tensor]:
        return self._other.with_hook(hook, process_group)

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[Tensor],
        options: ReductionOptions,
        instead_of: Reduction[Tensor] | None = None,
    ) -> Reduction[Tensor]:
        """In memory of its own: a hook's gradient buffer has no gaps, so its size differs from others."""
        if instead_of is not None:
            instead_of.reducer.close()
        calls = self._calls
        gradient_buffer = self._ops.allocate(plan, parameters)
        hook = calls.make_hooked(self._hook, gradient_buffer, parameters, self._process_group)
        transport = calls.make_transport(gradient_buffer, options, hook)
        reducer = ProcessGroupReducer(plan, transport, skip_unused=options.skip_unused)
        return over_group(gradient_buffer, transport, reducer, hook.shown.end)


def over_group(
    gradient_buffer: GradientBuffer[Tensor],
    transport: Transport[Tensor],
    reducer: ProcessGroupReducer,
    adopt_errors: Callable[[Collection[int] | None], None] | None = None,
) -> Reduction[Tensor]:
    return Reduction(
        gradient_buffer.plan,
        gradient_buffer.places,
        reducer,
        most_pointer_bytes=MOST_POINTER_BYTES if transport.pointers else 0,
        sections=gradient_buffer.sections,
        waiting=transport.waiting,
        order=reducer.order,
        adopt_errors=adopt_errors,
    )


def agree(communicator: Communicator[Any], numbers: Sequence[int]) -> list[int]:
    """Rank 0's numbers, on every rank. Collective."""
    own = np.array(numbers, np.int32).tobytes()
    return [int(number) for number in np.frombuffer(communicator.all_gather(own)[0], np.int32)]


def make_host_reducer(
    group: _core.HostGroup, plan: Plan, options: ReductionOptions, instead_of: Reduction[Any] | None
) -> _core.Reducer:
    """A gradient buffer in the memory of `group`, filled with zeros, and its reducer. Collective."""
    if instead_of is not None:
        instead_of.reducer.close()
    return _core.Reducer(
        group,
        plan.buffer_bytes,
        list(plan.offsets),
        [spec.numel for spec in plan.parameters],
        [CORE_DTYPES[spec.dtype] for spec in plan.parameters],
        [(bucket.begin_byte, bucket.end_byte) for bucket in plan.buckets],
        assigns_chunks=not options.gradients_in_buffer,
        owned=[
            (offset + each.begin, offset + each.end, each.rank)
            for offset, ranges in zip(plan.offsets, options.owned)
            for each in ranges
        ],
    )


BROADCAST_BYTES = 32 << 20  # large enough to run at full speed, small compared to models that need several


def pack(sizes: Iterable[int], most: int = BROADCAST_BYTES) -> list[range]:
    """Group consecutive items of these sizes into ranges of at most `most` bytes, or of one larger item."""
    runs: list[range] = []
    held = 0
    for index, size in enumerate(sizes):
        if runs and held + size <= most:
            runs[-1] = range(runs[-1].start, index + 1)
            held += size
        else:
            runs.append(range(index, index + 1))
            held = size
    return runs


Gather = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
"""Gathers the arrays of all ranks, by rank, of equal shape and dtype. Collective."""


def sum_rows(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum over the first dimension, with the bits of a sum on one host. Overwrites `rows`."""
    dtype, sums = CORE_DTYPES[rows.dtype.name], _core.REDUCE_OPS["sum"]

    def add(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        _core.reduce_arrays(dtype, sums, [left.ctypes.data, right.ctypes.data], [left.ctypes.data], left.size)
        return left

    with _core.DefaultFloats():
        return join_in_order(list(rows.reshape(len(rows), -1)), add).reshape(rows.shape[1:])


_LENGTH_BYTES = 8
_FIRST_BYTES = 1024  # most payloads are shorter, so that one call gathers them


def gather_bytes(gather: Gather, payload: bytes) -> list[bytes]:
    """Payloads of all ranks, by rank, of any lengths. Collective.

    The first call gathers the lengths and the beginnings; a second one is made if any payload is longer.
    """
    beginning = payload[: _FIRST_BYTES - _LENGTH_BYTES]
    rows = gather(_padded(len(payload).to_bytes(_LENGTH_BYTES, "little") + beginning, _FIRST_BYTES))
    lengths = rows[:, :_LENGTH_BYTES].copy().view("<i8").ravel()
    rows, longest = rows[:, _LENGTH_BYTES:], int(lengths.max())
    if longest > rows.shape[1]:
        rows = gather(_padded(payload, longest))
    return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]


def _padded(payload: bytes, size: int) -> np.ndarray[Any, Any]:
    """A writable array of `size` bytes that begins with the payload."""
    array = np.zeros(size, np.uint8)
    array[: len(payload)] = np.frombuffer(payload, np.uint8)
    return array
