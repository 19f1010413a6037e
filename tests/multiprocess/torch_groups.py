"""torch.distributed on the paceline backend, for tests: initialised and destroyed around a rank's program."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.torch import backend
from paceline.torch.backend.registration import OLDEST
from tests.multiprocess.rank_signals import barrier

# Both are deprecated under the old name in torch 2.13, and torch 2.11 has only that.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

needs_backend = pytest.mark.skipif(torch.__version__ < OLDEST, reason=f"the backend needs torch {OLDEST}")


@contextlib.contextmanager
def torch_group(rank: int, name: str = "paceline", *, timeout_s: float = 60) -> Iterator[dist.ProcessGroup]:
    """The default process group of all ranks, once each of them has started."""
    backend.register()
    barrier("started", rank)
    store = dist.FileStore(f"{os.environ['TMPDIR']}/store")
    dist.init_process_group(
        name,
        store=store,
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield dist.group.WORLD
    finally:
        if (
            torch.__version__ < "2.8"
        ):  # see `keep` in paceline/torch/communicator/calls.py, of tensors of the tests
            time.sleep(0.1)
        dist.destroy_process_group()
