"""What moves values and gradients between the ranks of one model.

The one idea: the memory that the ranks of one host share and a group of paddle.distributed do the same few
things, so that nothing above knows which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import paddle

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.paddle.arena import Arena, dtype_name, nbytes, shared_places
from paceline.paddle.calls import GroupCalls, MemoryCalls
from paceline.paddle.engine import PaddleTransport
from paceline.paddle.hooked import BucketHook
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.engine import EngineReducer
from paceline.reducer.host import CORE_DTYPES, make_host_reducer
from paceline.reducer.plan import Plan
from paceline.reducer.protocol import Reducer

_PIECE_BYTES = 32 << 20  # large enough to run at full speed, small beside a model that needs several


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are to be averaged.

    Attributes:
        gradients_in_arena: They will live in the arena. Not asked where a group averages.
        checks_finite: Look for infinities and NaNs. In memory that costs nothing, and is always done.
        skip_unused: Don't send buckets that no rank used in the pass before. In memory nothing is sent.
        hook: Averages buckets, which hold whole parameters, instead of memory or group.
        process_group: Of the wrapped model, for the hook.
    """

    gradients_in_arena: bool
    checks_finite: bool
    skip_unused: bool
    hook: CommHook | None
    process_group: Any


@dataclass(frozen=True)
class Reduction:
    """The gradients' memory and who averages it.

    Attributes:
        places: Each parameter's place, by index.
        reducer: Averages the places over the ranks.
        takes_pointers: Whether the reducer copies a gradient to its place, and the mean back, itself.
    """

    places: list[paddle.Tensor]
    reducer: Reducer
    takes_pointers: bool


class Link(Protocol):
    """Each of its methods but `tell` is collective.

    Attributes:
        path: Where gradients are averaged: "memory" or "group".
    """

    path: str
    rank: int
    world_size: int

    def broadcast(self, tensors: Sequence[paddle.Tensor], root: int = 0) -> None:
        """Replace the values of `tensors` by those of the rank `root`.

        Example:
            Rank 0 passes [[1.0, 2.0]] and rank 1 [[3.0, 4.0]]; afterwards both hold [[1.0, 2.0]].
        """
        ...

    def sum(self, tensor: paddle.Tensor) -> None:
        """Replace a contiguous tensor of float32 or float64 by its sum over the ranks."""
        ...

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Arrays of all ranks, by rank, of one shape and dtype."""
        ...

    def make_reduction(
        self, plan: Plan, parameters: Sequence[paddle.Tensor], options: ReductionOptions
    ) -> Reduction:
        """An arena for this plan, filled with zeros, and what averages it."""
        ...

    def tell(self, activity: str) -> None:
        """Let the errors of other ranks tell what this one was doing."""
        ...


class MemoryLink:
    """A `Link` through the memory that all ranks share. Tensors are on the CPU.

    Args:
        core: The memory.
        owner: Keeps it.
    """

    path = "memory"

    def __init__(self, core: _core.HostGroup, owner: object) -> None:
        self.rank = core.rank
        self.world_size = core.world_size
        self._core = core
        self._owner = owner

    def broadcast(self, tensors: Sequence[paddle.Tensor], root: int = 0) -> None:
        filled = [tensor for tensor in tensors if tensor.size]
        with paddle.no_grad():
            whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in filled]
            pieces = [flat.data_ptr() for flat in whole]
            sizes = [nbytes(flat) for flat in whole]
            self._core.broadcast_all(pieces, sizes, root)
            for tensor, flat in zip(filled, whole):
                if flat is not tensor:
                    paddle.assign(flat, tensor)

    def sum(self, tensor: paddle.Tensor) -> None:
        dtype = CORE_DTYPES[dtype_name(tensor.dtype)]
        self._core.all_reduce(tensor.data_ptr(), int(tensor.size), dtype, ReduceOp.SUM)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty((self.world_size, *array.shape), array.dtype)
        if array.nbytes:
            self._core.all_gather(array.ctypes.data, out.ctypes.data, array.nbytes)
        return out

    def make_reduction(
        self, plan: Plan, parameters: Sequence[paddle.Tensor], options: ReductionOptions
    ) -> Reduction:
        if options.hook is not None:
            return _over_calls(MemoryCalls(self._core), plan, parameters, options)
        reducer = make_host_reducer(self._core, plan, gradients_in_arena=options.gradients_in_arena)
        places = shared_places(plan, parameters, reducer.arena_pointer, reducer)
        return Reduction(places, reducer, takes_pointers=True)

    def tell(self, activity: str) -> None:
        self._core.set_activity(activity)


class GroupLink:
    """A `Link` through a group of paddle.distributed.

    Args:
        calls: On the group.
    """

    path = "group"

    def __init__(self, calls: GroupCalls) -> None:
        self.rank = calls.rank
        self.world_size = calls.world_size
        self._calls = calls

    def broadcast(self, tensors: Sequence[paddle.Tensor], root: int = 0) -> None:
        with paddle.no_grad():
            wires = [(tensor, self._calls.to_wire(_as_bytes(tensor))) for tensor in tensors if tensor.size]
            for piece in _pieces([wire for _, wire in wires]):
                self._broadcast_piece(piece, root)
            for tensor, wire in wires:
                if wire.data_ptr() != tensor.data_ptr():
                    _copy(paddle.view(wire, tensor.dtype).reshape(tensor.shape), tensor)

    def _broadcast_piece(self, piece: list[paddle.Tensor], root: int) -> None:
        packed = piece[0] if len(piece) == 1 else paddle.concat(piece)
        self._calls.complete(lambda: self._calls.broadcast(packed, root), "a broadcast of values")
        if packed is not piece[0]:
            for each, part in zip(piece, paddle.split(packed, [int(each.size) for each in piece])):
                paddle.assign(part, each)

    def sum(self, tensor: paddle.Tensor) -> None:
        wire = self._calls.to_wire(tensor)
        self._calls.complete(lambda: self._calls.all_reduce(wire), "a sum of values")
        if wire is not tensor:
            _copy(wire, tensor)

    def gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._calls.gather(array, "rows of sparse gradients")

    def make_reduction(
        self, plan: Plan, parameters: Sequence[paddle.Tensor], options: ReductionOptions
    ) -> Reduction:
        return _over_calls(self._calls, plan, parameters, options)

    def tell(self, activity: str) -> None:
        if self._calls.witness is not None:
            self._calls.witness.tell(activity)


def _over_calls(
    calls: GroupCalls, plan: Plan, parameters: Sequence[paddle.Tensor], options: ReductionOptions
) -> Reduction:
    arena, hook = Arena(plan, parameters), None
    if options.hook is not None:
        hook = BucketHook(options.hook, arena, parameters, calls, options.process_group)
    transport = PaddleTransport(arena, calls, checks_finite=options.checks_finite, hook=hook)
    reducer = EngineReducer(plan, transport, skip_unused=options.skip_unused)
    return Reduction(arena.places, reducer, takes_pointers=False)


def _copy(source: paddle.Tensor, target: paddle.Tensor) -> None:
    if source.place == target.place:
        paddle.assign(source, target)
    else:
        target.copy_(source, True)


def _as_bytes(tensor: paddle.Tensor) -> paddle.Tensor:
    """The tensor's own memory as flat bytes, or a copy of it."""
    whole = tensor.detach().contiguous().reshape([-1])
    flat = paddle.view(whole, "uint8")
    if flat.data_ptr() != whole.data_ptr():  # a part of a larger tensor, of which Paddle takes another part
        flat = paddle.view(whole.clone(), "uint8")
    return flat


def _pieces(flats: list[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """The tensors in lists of at most _PIECE_BYTES, or of one."""
    pieces: list[list[paddle.Tensor]] = []
    size = _PIECE_BYTES
    for flat in flats:
        size += int(flat.size)
        if size > _PIECE_BYTES:
            pieces.append([])
            size = int(flat.size)
        pieces[-1].append(flat)
    return pieces
