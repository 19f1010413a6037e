"""Means have the same bits on all ranks when torch's threads on one rank flush subnormals to zero.

test_conformance_floats.py tests what both front ends promise about floating-point settings.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.other_floats import other_floats


@ranks(2, group="gloo")
def test_a_large_mean_that_is_corrected_by_torchs_threads_has_the_same_bits(rank):
    with other_floats("flushed" if rank == 1 else None):
        torch.set_num_threads(2)  # these threads start now and inherit this thread's settings
        ddp = DistributedDataParallel(nn.Linear(1000, 200, bias=False), reduce_through="group")
        ddp.weight(rank + 1)
        subnormal = 1e-39 if rank == 0 else 0.0
        (ddp(torch.ones(1, 1000)) * subnormal).sum().backward()
    own = ddp.module.weight.grad.view(torch.int32)
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    assert torch.equal(*gathered)
    assert (own != 0).all()
