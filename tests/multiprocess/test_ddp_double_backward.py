"""Gradients of gradients: penalties, and backwards that make a graph."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import two_layers

PATHS = ["memory", "group"]


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_gradient_penalty_trains_as_one_process_does(rank: int, path: str) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x).pow(2).mean(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out + (slope.norm(dim=1) - 1).square()).mean()

    for view in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        alone = copy.deepcopy(net)
        ddp = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, alone)]
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(ddp, x[2 * rank : 2 * rank + 2]).backward()
            loss_of(alone, x).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_close(list(net.parameters()), list(alone.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@kept_ranks(2, group="gloo")
def test_a_backward_that_makes_a_graph_averages_too(rank: int) -> None:
    for path in PATHS:
        for view in (False, True):
            net = nn.Linear(3, 1, bias=False)
            ddp = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
            for _ in range(2):
                ddp.zero_grad()
                ddp(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward(create_graph=True)
                assert_close(net.weight.grad.detach(), torch.full((1, 3), 2.0))


@kept_ranks(2, group="gloo")
def test_second_derivatives_may_be_taken_after_backward(rank: int) -> None:
    for view in (False, True):
        ddp = DistributedDataParallel(two_layers(), gradient_as_bucket_view=view)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about the cycle that create_graph makes
            ddp(torch.full((1, 4), 1.0 + rank)).sum().backward(create_graph=True)
        assert_close(ddp.module[2].bias.grad.detach(), torch.ones(2))
        ddp.zero_grad(set_to_none=True)
