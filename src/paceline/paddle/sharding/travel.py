"""How the ranks of a `ShardedOptimizer` meet, and how what each has written travels, for Paddle."""

from __future__ import annotations

import paddle

from paceline.paddle.communicator.communicators import Communicator, MemoryCommunicator
from paceline.paddle.model.parameters import nbytes
from paceline.sharding.travel import GroupTravel, MemoryTravel, Travel


class _PaddleArrays:
    """See `Arrays`."""

    def byte(self) -> paddle.Tensor:
        return paddle.to_tensor([0], "uint8", place=paddle.CPUPlace())

    def place_of(self, tensor: paddle.Tensor) -> tuple[int, int] | None:
        return (tensor.data_ptr(), nbytes(tensor)) if tensor.is_contiguous() else None

    def room_for(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return paddle.empty(tensor.shape, tensor.dtype)

    def copy(self, source: paddle.Tensor, target: paddle.Tensor) -> None:
        with paddle.no_grad():
            paddle.assign(source, target)


def travel_over(communicator: Communicator, *, on_host: bool) -> Travel[paddle.Tensor]:
    """The best way over a communicator; `on_host`: all parameters lie on the CPU."""
    if isinstance(communicator, MemoryCommunicator):
        return MemoryTravel(communicator.core, _PaddleArrays())
    return GroupTravel(communicator, _PaddleArrays() if on_host else None)
