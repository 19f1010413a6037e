"""What communicators ask of torch's tensors; see `CommunicatorOps`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.reducer.communicator import Communicator
from paceline.reducer.plan import Plan
from paceline.torch.communicator.comm_hook import TorchHook
from paceline.torch.communicator.gradient_buffer import allocate as allocate
from paceline.torch.communicator.gradient_buffer import buffer_at
from paceline.torch.communicator.transport import ProcessGroupTransport
from paceline.torch.model.inner_tensors import plain_tensors as plain_tensors
from paceline.torch.model.parameters import dtype_name

make_hooked, make_transport = TorchHook, ProcessGroupTransport
DEVICE = "a GPU"
HOW_TO_FORM_A_GROUP = 'call torch.distributed.init_process_group("nccl" or "gloo") first'


@torch.no_grad()
def on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.detach().cpu().contiguous()


@torch.no_grad()
def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def kind_of(tensor: torch.Tensor) -> tuple[str, int]:
    return dtype_name(tensor.dtype), tensor.numel()


def as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.array(tensor.detach().cpu().numpy())


def from_array(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(array)


def places_at(
    plan: Plan, parameters: Sequence[torch.Tensor], pointer: int, owner: object
) -> Sequence[torch.Tensor]:
    return buffer_at(plan, parameters, pointer, owner).places


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
