"""torch's side of `failing` and `launched`."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DistributedDataParallel, LocalSGD, init_process_group


def join(by_framework: bool) -> int:
    """Form the group with torch's own call or with Paceline's; return the rank of this process."""
    torch.set_num_threads(1)
    form = dist.init_process_group if by_framework else init_process_group
    form("gloo", timeout=timedelta(seconds=90))
    return dist.get_rank()


def backward_of(path: str, width: int = 64) -> Callable[[], None]:
    """Return a function that runs one backward of a model with width * (width + 1) parameters.

    With "torch" the wrapper is torch's DDP. With "local_sgd" the function also takes an optimizer step, and
    the hosts sync in every fourth step.
    """
    model: nn.Module
    if path == "torch":
        model = nn.parallel.DistributedDataParallel(nn.Linear(width, width))
    elif path == "local_sgd":
        model = DistributedDataParallel(nn.Linear(width, width), local_sgd=LocalSGD(4), timeout_s=60)
    else:
        model = ours = DistributedDataParallel(nn.Linear(width, width), reduce_through=path, timeout_s=60)
        assert ours.gradient_path == ("hosts" if path == "auto" else "group")
    x = torch.ones(4, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def backward() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if path == "local_sgd":
            optimizer.step()

    return backward


def gradient_of(rank: int) -> tuple[float, str]:
    """Return an averaged gradient of one backward, to which rank r contributes 2 (r + 1), and its path."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    gradient, *_ = model.module.weight.grad.flatten().tolist()
    return gradient, model.gradient_path


def leave() -> None:
    """Wait for all ranks: rank 0, which serves torch's store, must not end before the others."""
    dist.barrier()
    dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size()


def end_at_once(status: int) -> None:
    """End without the interpreter's shutdown, in which Gloo's threads would abort the process."""
    os._exit(status)
