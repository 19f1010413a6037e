"""What accumulates in no_sync() is averaged by the next synchronised backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import Branches, share, two_layers

PATHS = ["group", "memory"]


WORLD = 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@ranks(WORLD, group="gloo")
def test_no_sync_accumulates_and_the_next_pass_averages_all(rank: int, path: str, view: bool) -> None:
    model, x = two_layers(), torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
    own = share(x, rank, WORLD)
    for _ in range(2):
        with ddp.no_sync():
            ddp(own[:2]).square().mean().backward()
            local = model[0].weight.grad.clone()
        ddp(own[2:]).square().mean().backward()
        for part in (share(x, 0, 2), share(x, 1, 2)):
            (alone(part[:2]).square().mean() / 2 + alone(part[2:]).square().mean() / 2).backward()
        for ours, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            assert_close(ours.grad, expected.grad)
        assert not torch.equal(local, model[0].weight.grad)


@pytest.mark.parametrize("path", PATHS)
@ranks(WORLD, group="gloo")
def test_what_accumulated_counts_even_if_the_last_backward_leaves_it_out(rank: int, path: str) -> None:
    model = Branches()
    del model.never
    ddp = DistributedDataParallel(model, reduce_through=path)
    x = torch.full((1, 3), 1.0 + rank)
    with ddp.no_sync():
        ddp(x, "both").sum().backward()
    ddp(x, "left").sum().backward()
    assert_close(model.left.weight.grad, torch.full((2, 3), 3.0))
    assert_close(model.right.weight.grad, torch.full((2, 3), 1.5))
