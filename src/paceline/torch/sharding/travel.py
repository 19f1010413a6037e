"""How the ranks of a `ShardedOptimizer` meet, and how what each has written reaches the others, for torch."""

from __future__ import annotations

import torch

from paceline import _core
from paceline.reducer.communicator import Communicator
from paceline.sharding.travel import GroupTravel, MemoryTravel, Travel
from paceline.torch.communicator.communicators import MemoryCommunicator
from paceline.torch.communicator.gradient_buffer import is_dense


class _TorchArrays:
    """See `Arrays`."""

    def byte(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def place_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        return (tensor.data_ptr(), tensor.nbytes) if is_dense(tensor) else None

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)


def travel_in(core: _core.HostGroup) -> Travel[torch.Tensor]:
    """The way through the memory of a host."""
    return MemoryTravel(core, _TorchArrays())


def travel_over(communicator: Communicator[torch.Tensor], *, on_host: bool) -> Travel[torch.Tensor]:
    """The best way over a communicator; `on_host`: all parameters lie on the CPU."""
    if isinstance(communicator, MemoryCommunicator):
        return travel_in(communicator.core)
    return GroupTravel(communicator, _TorchArrays() if on_host else None)
