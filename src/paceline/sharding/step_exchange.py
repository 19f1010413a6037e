"""Syncs the ranks in a step, and exchanges what each has written: in shared memory, or over a process
group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from paceline import _core
from paceline.reducer.communicator import Communicator
from paceline.reducer.framework_ops import FrameworkOps, Tensor, nbytes
from paceline.sharding.step_barriers import NUMBERS_BYTES

IDLE = 1
"""The outcome of a rank that has nothing to write in a step."""

_PACKED_BYTES = 1 << 20  # copying a larger tensor takes longer than one more broadcast

Spread = TypeVar("Spread", contravariant=True)


class Travel(Protocol[Spread]):
    """Moves the bytes of a step between the ranks. All methods but `prepare` and `fail` are collective."""

    def gather(self, numbers: bytes) -> bytes: ...

    def barrier(self) -> None:
        """Return when all ranks have made this call; what they wrote before is visible."""
        ...

    def prepare(self, by_rank: Sequence[Sequence[Spread]]) -> Any: ...

    def spread(self, prepared: Any, outcome: int) -> bytes | None:
        """Overwrite each rank's tensors with the values that this rank has written. Collective.

        Returns:
            The outcome of each rank, if it is sent along; None: call `outcomes`.
        """
        ...

    @property
    def compares_outcomes(self) -> bool: ...

    def outcomes(self, own: int) -> bytes:
        """The outcome of each rank, one byte per rank. Afterwards all earlier writes of all ranks are
        visible.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Report this rank's failure, so that the others raise at once and quote it. Does not block."""
        ...


class MemoryTravel(Generic[Tensor]):
    """A `Travel` through the memory of a host, for tensors on the CPU."""

    def __init__(self, core: _core.HostGroup, ops: FrameworkOps[Tensor]) -> None:
        self._core = core
        self._ops = ops
        self._own = np.zeros(NUMBERS_BYTES, np.uint8)
        self._all = np.zeros(core.world_size * NUMBERS_BYTES, np.uint8)
        # Looking up the address of a numpy array takes longer than a barrier.
        self._own_at, self._all_at = self._own.ctypes.data, self._all.ctypes.data
        self._own_bytes = self._own.data
        self._outcomes = (ctypes.c_ubyte * core.world_size)()

    def gather(self, numbers: bytes) -> bytes:
        self._own_bytes[:] = numbers
        self._core.all_gather(self._own_at, self._all_at, NUMBERS_BYTES)
        return self._all.tobytes()

    def barrier(self) -> None:
        self._core.barrier()

    def prepare(self, by_rank: Sequence[Sequence[Tensor]]) -> Any:
        if not any(by_rank):
            return None
        pieces, sizes, copies = [], [], []
        for rank, tensors in enumerate(by_rank):
            for tensor in tensors:
                place = tensor
                if not self._ops.is_dense(tensor):
                    place = self._ops.empty(tensor.shape, tensor.dtype, tensor)
                    copies.append((tensor, place))
                pieces.append(place.data_ptr())
                sizes.append(nbytes(place))
            pieces.append(ctypes.addressof(self._outcomes) + rank)
            sizes.append(1)
        return pieces, sizes, [len(each) + 1 for each in by_rank], copies

    def spread(self, prepared: Any, outcome: int) -> bytes | None:
        if prepared is None:
            return None
        pieces, sizes, counts, copies = prepared
        for tensor, room in copies:
            self._ops.copy(tensor, room)
        self._outcomes[self._core.rank] = outcome
        self._core.all_gather_pieces(pieces, sizes, counts)
        for tensor, room in copies:
            self._ops.copy(room, tensor)
        return bytes(self._outcomes)

    compares_outcomes = True

    def outcomes(self, own: int) -> bytes:
        return _outcomes(self._core, own)

    def fail(self, error: BaseException) -> None:
        self._core.abort(f"{type(error).__name__}: {error}")


class GroupTravel(Generic[Tensor]):
    """A `Travel` through a communicator over a process group."""

    def __init__(self, communicator: Communicator[Tensor], ops: FrameworkOps[Tensor] | None) -> None:
        self._communicator, self._ops = communicator, ops

    def gather(self, numbers: bytes) -> bytes:
        return b"".join(self._communicator.all_gather(numbers))

    def barrier(self) -> None:
        self._communicator.all_gather(b"")

    def prepare(self, by_rank: Sequence[Sequence[Tensor]]) -> Any:
        if self._ops is None:
            return [[tensors] if tensors else [] for tensors in by_rank], []
        outcomes = [self._ops.from_bytes(b"\0") for _ in by_rank]
        return [self._with(byte, tensors) for byte, tensors in zip(outcomes, by_rank)], outcomes

    def _with(self, byte: Tensor, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        assert self._ops is not None
        if len(tensors) == 1 and self._ops.is_dense(tensors[0]) and nbytes(tensors[0]) > _PACKED_BYTES:
            return [[*tensors], [byte]]
        return [[*tensors, byte]] if tensors else []

    def spread(self, prepared: Any, outcome: int) -> bytes | None:
        by_rank, outcomes = prepared
        values = [ctypes.c_ubyte.from_address(byte.data_ptr()) for byte in outcomes]
        for rank, value in enumerate(values):
            value.value = outcome if rank == self._communicator.rank and by_rank[rank] else IDLE
        for rank, broadcasts in enumerate(by_rank):
            for tensors in broadcasts:
                self._communicator.broadcast(tensors, root=rank)
        return bytes(value.value for value in values) or None

    @property
    def compares_outcomes(self) -> bool:
        return self._ops is not None or self._memory is not None

    def outcomes(self, own: int) -> bytes:
        if self._memory is not None:
            return _outcomes(self._memory, own)
        return b"".join(self._communicator.all_gather(bytes([own])))

    @property
    def _memory(self) -> _core.HostGroup | None:
        """The shared memory of all ranks, if there is any."""
        peer_monitor = self._communicator.peer_monitor
        return None if peer_monitor is None else peer_monitor.core

    def fail(self, error: BaseException) -> None:
        if self._communicator.peer_monitor is not None:
            self._communicator.peer_monitor.fail(error)


def _outcomes(core: _core.HostGroup, own: int) -> bytes:
    mine, of_ranks = ctypes.c_ubyte(own), (ctypes.c_ubyte * core.world_size)()
    core.all_gather(ctypes.addressof(mine), ctypes.addressof(of_ranks), 1)
    return bytes(of_ranks)


def exchange_over(
    communicator: Communicator[Tensor], ops: FrameworkOps[Tensor], *, on_host: bool
) -> Travel[Tensor]:
    if communicator.path == "memory":
        return MemoryTravel(cast(Any, communicator).core, ops)
    return GroupTravel(communicator, ops if on_host else None)
