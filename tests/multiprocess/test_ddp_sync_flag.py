"""DDP reads `require_backward_grad_sync` when a backward begins, like a `no_sync()` around that backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

BATCH = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
MICRO_BATCHES = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def expected() -> list[torch.Tensor]:
    one = model().double()
    one(BATCH.double()).square().mean().backward()
    return [p.grad for p in one.parameters()]


@pytest.mark.parametrize("path", ["memory", "group"])
@pytest.mark.parametrize("moment", ["before forward", "after forward", "first after, last before"])
@kept_ranks(2, group="gloo")
def test_the_flag_is_set_in_a_loop_of_micro_batches(rank: int, moment: str, path: str) -> None:
    ddp = DistributedDataParallel(model(), reduce_through=path)
    for step in range(3):
        ddp.zero_grad()
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            is_before = moment == "before forward" or ("last before" in moment and is_last)
            if is_before:
                ddp.require_backward_grad_sync = is_last
            x = BATCH[micro * 4 + 2 * rank : micro * 4 + 2 * rank + 2]
            loss = ddp(x).square().mean() / MICRO_BATCHES
            if not is_before:
                ddp.require_backward_grad_sync = is_last
            loss.backward()
            assert ddp.num_good_passes == step + is_last
    for p, want in zip(ddp.parameters(), expected(), strict=True):
        assert_close(p.grad.double(), want, rtol=1e-5, atol=1e-6)


@kept_ranks(2, group="gloo")
def test_no_sync_and_the_flag(rank: int) -> None:
    ddp = DistributedDataParallel(model())
    x = BATCH[rank * 8 : rank * 8 + 8]

    def backwards(call: Any) -> int:
        before = ddp.num_good_passes
        call()
        return ddp.num_good_passes - before

    with ddp.no_sync():
        loss = ddp(x).mean()
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = True  # its value is unchanged, so the forward's no_sync() decides
    assert backwards(loss.backward) == 0
    first = ddp(x).mean()
    ddp.require_backward_grad_sync = False
    assert backwards(lambda: first.backward(retain_graph=True)) == 0
    ddp.require_backward_grad_sync = True
    assert backwards(first.backward) == 1
    assert backwards(lambda: ddp(x).mean().backward()) == 1
