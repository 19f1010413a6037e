"""A wrapped model that goes on with other ranks."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.testing import assert_close

from paceline.errors import ConfigError, PeerLostError
from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import two_layers


def mean_of_ones(ddp: DistributedDataParallel, factor: float) -> torch.Tensor:
    """The mean over ranks of `factor`."""
    ddp.zero_grad()
    (ddp(torch.ones(1, 4)).sum() * factor).backward()
    return ddp.module[2].bias.grad


@ranks(3, group="gloo", dies={2: signal.SIGKILL})
def test_ranks_may_leave_die_and_come_back(rank: int) -> None:
    pair = dist.new_group([0, 1])
    three, two = torch.full((2,), 2.0), torch.full((2,), 1.5)
    for options in ({"reduce_through": "group"}, {"gradient_as_bucket_view": True}, {}):
        ddp = DistributedDataParallel(two_layers(), bucket_cap_mb=0.00001, **options)
        for _ in range(2):
            assert_close(mean_of_ones(ddp, 1.0 + rank), three)
        late = ddp(torch.ones(1, 4)).sum()
        old = weakref.ref(ddp._passes)
        ddp._update_process_group(pair)
        if rank < 2:
            assert ddp.process_group is pair
            with pytest.raises(ConfigError, match="has another process group now"):
                late.backward()
            del late
            ddp.zero_grad()
            gc.collect()
            assert old() is None
            for _ in range(2):
                assert_close(mean_of_ones(ddp, 1.0 + rank), two)
        ddp._update_process_group(dist.group.WORLD)
        assert_close(mean_of_ones(ddp, 1.0 + rank), three)
    ddp = DistributedDataParallel(two_layers(), timeout_s=20)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        mean_of_ones(ddp, 1.0 + rank)
    ddp._update_process_group(pair)
    for _ in range(2):
        assert_close(mean_of_ones(ddp, 1.0 + rank), two)
    ddp.register_comm_hook(pair, fp16_compress_hook)
    ddp._update_process_group(pair)
    assert ddp.reduces_through == "group"  # the hook is still there
    assert_close(mean_of_ones(ddp, 1.0 + rank), two)
