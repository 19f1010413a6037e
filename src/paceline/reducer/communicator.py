"""What moves values and gradients between the ranks of one model, whoever they are.

The one idea: the memory that the ranks of one host share and a process group of the framework do the same few
things, so nothing above knows which it is. Each front end has a `MemoryCommunicator`, a `GroupCommunicator`,
one between hosts, whose reducer sums within each host first (`hierarchical.py`), and one that gives buckets
to a user's hook and leaves all else to another communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from paceline import _core
from paceline.health.peer_monitor import PeerMonitor, Tell
from paceline.reducer.call_order import CallOrder
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.owners import Ranges
from paceline.reducer.plan import Plan
from paceline.reducer.protocol import Reducer
from paceline.reducer.sum_order import join_in_order

_Tensor = TypeVar("_Tensor")

CORE_DTYPES = {name: _core.DTYPES[name] for name in ("float32", "float64", "float16", "bfloat16")}
"""Gradients that the core averages."""


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are to be averaged.

    Attributes:
        gradients_in_buffer: They will live in the gradient buffer. Not asked where a group averages.
        checks_finite: Look for infinities and NaNs. In memory that costs nothing, and is always done.
        skip_unused: Don't send buckets that no rank used in the backward before. In memory nothing is sent.
        owned: Who needs which part of each mean, for each parameter of the plan; empty: all ranks need all.
            In memory only.
        waits_for_finite: Tell of infinities in the backward that has them, even where that waits for a
            device.
    """

    gradients_in_buffer: bool
    checks_finite: bool
    skip_unused: bool
    owned: tuple[Ranges, ...] = ()
    waits_for_finite: bool = True


@dataclass(frozen=True)
class Reduction(Generic[_Tensor]):
    """The gradients' memory and who averages it; made anew whenever the plan changes.

    Attributes:
        plan: The plan of the gradient buffer.
        places: Each parameter's place in the gradient buffer, by index.
        reducer: Averages the places over the ranks.
        most_pointer_bytes: The largest gradient that the reducer copies to its place, and the mean back,
            itself. Others the framework copies, with all its threads.
        sections: Memory of the gradient buffer that another plan of the same parameters may use again.
        waiting: Gradients, by parameter, that are copied to their places when their bucket is complete; None:
            gradients are copied one by one.
        order: In which backward passes of all models make their calls over an engine that pairs the calls of
            different ranks by it; None: nobody pairs them so.
        owned: Who gets which part of each mean; empty: all ranks get all.
        adopt_errors: Called at the end of each backward where gradients are encoded, with the parameters that
            no rank used: what encoding took from the others is added to the next gradients. With None the
            backward was not good on all ranks, and nothing of it comes back. None: nothing is encoded.
    """

    plan: Plan
    places: Sequence[_Tensor]
    reducer: Reducer
    most_pointer_bytes: int
    sections: Sequence[_Tensor] = ()
    waiting: dict[int, _Tensor] | None = None
    order: CallOrder | None = None
    owned: tuple[Ranges, ...] = ()
    adopt_errors: Callable[[Collection[int] | None], None] | None = None


class Communicator(Protocol[_Tensor]):
    """Between all ranks that train a model. Its methods are collective, but for `tell` and `with_hook`.

    Attributes:
        path: Where gradients are averaged: "memory", "hosts" (within each, and then between them) or "group";
            a hook counts as a group.
        peer_monitor: Names ranks that are lost or late, where calls go over a process group, or None.
        bits: Which runs give gradients of the same bits; see `WrappedModel.bits`.
        wants_whole_buckets: Whether a bucket must hold whole parameters, for a hook to look at.
        most_bucket_bytes: Most of a bucket, whatever the model asks for; None: there is no such limit.
    """

    path: str
    bits: str
    rank: int
    world_size: int
    peer_monitor: PeerMonitor | None
    wants_whole_buckets: bool
    most_bucket_bytes: int | None

    @property
    def tell(self) -> Tell | None:
        """Lets the errors of other ranks tell what this one was doing; None: they can't."""
        ...

    def broadcast(self, tensors: Sequence[_Tensor], root: int = 0) -> None:
        """Replace the values of `tensors` by those of the rank `root`.

        Example:
            Rank 0 passes [[1.0, 2.0]] and rank 1 [[3.0, 4.0]]; afterwards both hold [[1.0, 2.0]].
        """
        ...

    def prepare_broadcast(self, tensors: Sequence[_Tensor]) -> Callable[[int], None]:
        """Get ready to broadcast these tensors again and again. Not collective.

        Returns:
            What does it, given the root. Collective; as long as the tensors lie in the same memory, in the
            same form.
        """
        ...

    def sum(self, tensor: _Tensor) -> None:
        """Replace a contiguous tensor of float32 or float64 by its sum over the ranks."""
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Payloads of all ranks, by rank, of any lengths."""
        ...

    def make_reduction(
        self,
        plan: Plan,
        parameters: Sequence[_Tensor],
        options: ReductionOptions,
        instead_of: Reduction[_Tensor] | None = None,
    ) -> Reduction[_Tensor]:
        """A gradient buffer for this plan, filled with zeros, and what averages it.

        Args:
            plan: The same on all ranks.
            parameters: Those that the plan lists.
            options: The same on all ranks.
            instead_of: The reduction of another plan, which is over: it is closed, or its memory used again.
        """
        ...

    def with_hook(self, hook: CommHook, process_group: Any) -> Communicator[_Tensor]:
        """A communicator that gives buckets to a hook of the user's, and does all else as this one.

        Args:
            hook: The same on all ranks.
            process_group: The process group of the wrapped model, for the hook.
        """
        ...


def agree(communicator: Communicator[Any], numbers: Sequence[int]) -> list[int]:
    """Rank 0's numbers, on every rank. Collective.

    Args:
        communicator: Between the ranks.
        numbers: Below 2**31.

    Example:
        Rank 0 passes [2, 0, 1] and rank 1 [0, 1, 2]; both get [2, 0, 1].
    """
    own = np.array(numbers, np.int32).tobytes()
    return [int(number) for number in np.frombuffer(communicator.all_gather(own)[0], np.int32)]


def make_host_reducer(
    group: _core.HostGroup, plan: Plan, options: ReductionOptions, instead_of: Reduction[Any] | None
) -> _core.Reducer:
    """A gradient buffer in the memory of `group`, filled with zeros, and what averages it. Collective.

    Args:
        group: All ranks that train the model.
        plan: The same on all ranks.
        options: Whether gradients will live in the gradient buffer; else they are handed over by pointer.
        instead_of: Is closed first, and gives its memory back.

    Example:
        Both ranks write 1 and 3 at `plan.offsets[0]` after `reducer.buffer_pointer`, call
        `reducer.mark_ready(0, 0)` and `reducer.finish(BackwardStatus(1), False)`, and find 2 there.
    """
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


BROADCAST_BYTES = 32 << 20  # large enough to run at full speed, small beside a model that needs several


def pack(sizes: Iterable[int], most: int = BROADCAST_BYTES) -> list[range]:
    """Things of these sizes, in order, in runs of at most so many bytes, or of one thing.

    Example:
        >>> pack([4, 4, 9, 1], most=8)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
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
"""Arrays of all ranks, by rank, of one shape and dtype. Collective."""


def gather_in_memory(core: _core.HostGroup, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A `Gather` through the memory of a host."""
    out = np.empty((core.world_size, *array.shape), array.dtype)
    if array.nbytes:
        core.all_gather(array.ctypes.data, out.ctypes.data, array.nbytes)
    return out


def sum_rows(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum over the first dimension, with the bits of a sum in the memory of one host. Overwrites `rows`.

    Args:
        rows: C-contiguous, of float32 or float64; by rank.
    """
    dtype, sums = CORE_DTYPES[rows.dtype.name], _core.REDUCE_OPS["sum"]

    def add(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        _core.reduce_arrays(dtype, sums, [left.ctypes.data, right.ctypes.data], [left.ctypes.data], left.size)
        return left

    with _core.DefaultFloats():
        return join_in_order(list(rows.reshape(len(rows), -1)), add).reshape(rows.shape[1:])


def gather_bytes(gather: Gather, payload: bytes) -> list[bytes]:
    """Payloads of all ranks, by rank, of any lengths. Collective.

    Example:
        Rank 0 passes b"a" and rank 1 b"bc"; both get [b"a", b"bc"].
    """
    lengths = gather(np.array([len(payload)], np.int64)).ravel()
    own = np.zeros(max(1, int(lengths.max())), np.uint8)
    own[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = gather(own)
    return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]
