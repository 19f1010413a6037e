"""A training run whose state is saved: how long that delays a step, compared with one copy of the state."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline
from benchmarks.workers.torch_models import form_group, wrap

_LAYER = 1_000_000


class SavedRun:
    """A rank that trains with Adam and saves its state.

    Args:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        form_group("gloo", rank, world_size)
        self._folder = tempfile.TemporaryDirectory()
        folders = [self._folder.name]
        dist.broadcast_object_list(folders, 0)  # the same folder for all ranks, so that rank 0 alone writes
        self._path = folders[0]

    def prepare(self, layers: int) -> int:
        """Train one step of a model with `layers` layers of 1,000,000 parameters, save it, and make a copy.

        Returns:
            The size of the state in bytes, on rank 0.
        """
        ddp: Any = wrap("paceline", nn.ParameterList([torch.randn(_LAYER) for _ in range(layers)]))
        optimizer = torch.optim.Adam(ddp.parameters(), fused=True)
        for parameter in ddp.parameters():
            parameter.grad = torch.randn(_LAYER)
        optimizer.step()
        ddp.register_state("optimizer", optimizer)
        self._checkpointer = paceline.Checkpointer(self._path, ddp, keep=1)
        self._checkpointer.step()
        self._checkpointer.save()
        self._tensors = list(_tensors_in(ddp.training_state()))
        self._copies = [tensor.clone() for tensor in self._tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def time_both(self) -> dict[str, float]:
        """Return the seconds of a copy of the state to allocated memory, and of a step that saves."""
        self._checkpointer.save()  # waits for the last write; there is nothing new to save
        began = time.perf_counter()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(tensor)
        copy_s = time.perf_counter() - began
        dist.barrier()  # a step ends on all ranks at once, and so does not wait for a rank that copies longer
        began = time.perf_counter()
        self._checkpointer.step()
        self._checkpointer.save()
        return {"copy_s": copy_s, "held_up_s": time.perf_counter() - began}


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_in(each)
