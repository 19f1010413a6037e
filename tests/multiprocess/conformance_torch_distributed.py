"""The torch adapter of the conformance tests, with gradients reduced through torch.distributed."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn

from paceline.torch import DistributedDataParallel
from tests.harness.rank_main import after_test
from tests.multiprocess.conformance_torch import *  # noqa: F403


def join(rank: int, world_size: int) -> None:
    """Initialise torch.distributed, unless an earlier call has."""
    if not dist.is_initialized():
        store = dist.FileStore(f"{os.environ['TMPDIR']}/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        after_test(dist.destroy_process_group)


def wrap(model: nn.Module, group: Any, **options: Any) -> DistributedDataParallel:
    join(group.rank, group.world_size)
    wrapped = DistributedDataParallel(model, reduce_through="group", **options)
    assert wrapped.gradient_path == "group"
    return wrapped
