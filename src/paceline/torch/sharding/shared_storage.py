"""Where parameters of torch's live: what `sharding.shared_parameters` asks of torch's tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from paceline import _core
from paceline.sharding import shared_parameters
from paceline.sharding.shared_parameters import WrapperNames
from paceline.torch.communicator.gradient_buffer import extent

SharedStorage = shared_parameters.SharedStorage[torch.Tensor]


class _TorchPlacing:
    """See `Placing`."""

    names = WrapperNames(
        wrapper="DistributedDataParallel",
        variable="ddp",
        loading="ddp.load_state_dict()",
        moving="module.to(), half(), share_memory() or `parameter.data = ...`",
    )

    def extent(self, tensor: torch.Tensor) -> int:
        return extent(tensor)

    def view(self, like: torch.Tensor, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        memory = (ctypes.c_char * nbytes).from_address(pointer)
        memory.owner = owner  # type: ignore[attr-defined]
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.preserve_format)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def lay(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        parameter.data = values

    def note_writes(self, parameters: Sequence[torch.Tensor]) -> None:
        torch.autograd.graph.increment_version(parameters)

    def version(self, tensor: torch.Tensor) -> int:
        return tensor._version

    def is_in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def hashes(self, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        whole = [tensor.detach().contiguous() for tensor in tensors]
        return _core.hash_all([each.data_ptr() for each in whole], [each.nbytes for each in whole])


PLACING = _TorchPlacing()
