"""Several wrapped modules in one backward: chained, with shared parameters, or nested."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from paceline.torch.backward.graphs import RunningCall
from tests.harness import kept_ranks

PATHS = ["memory", "group"]
WIDTH = 256  # a weight of 256 KiB: large and small buckets take different code paths in shared memory


class Pair(nn.Module):
    """Two modules that share layers, followed by a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        first = nn.Linear(4, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.left = nn.Sequential(first, shared, nn.Tanh())
        self.right = nn.Sequential(first, nn.Sequential(nn.Sigmoid(), shared))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.left(x) + self.right(x * 2))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_parameters_of_two_wrapped_modules(rank: int, path: str) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    own = x[2 * rank : 2 * rank + 2]
    for view in (False, True):
        for nested in (False, True):
            net = Pair()
            alone = copy.deepcopy(net)
            model: nn.Module = net
            for name in ("left", "right", "head"):
                wrapped = DistributedDataParallel(
                    getattr(net, name), reduce_through=path, gradient_as_bucket_view=view
                )
                setattr(net, name, wrapped)
            if nested:
                model = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
            for step in range(3):
                for module in (model, alone):
                    module.zero_grad()
                alone(x + step).square().mean().backward()
                model(own + step).square().mean().backward()
                check(net, alone)
            if not nested:  # each module averages in a backward of its own output
                for module, reference in ((net.left, alone.left), (net.right, alone.right)):
                    net.zero_grad()
                    alone.zero_grad()
                    module(own).square().mean().backward()
                    reference(x).square().mean().backward()
                    check(net, alone)


def check(net: nn.Module, alone: nn.Module) -> None:
    for ours, expected in zip(net.parameters(), alone.parameters(), strict=True):
        if expected.grad is None:
            assert ours.grad is None
        else:
            assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_seen", [True, False])
@kept_ranks(2, group="gloo")
def test_wrapped_twice_but_used_once(rank: int, is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is wrapped again while its old wrapper exists.

    `is_seen` is False: the hooks cannot find out which kind of autograd call runs them.
    """
    if not is_seen:
        monkeypatch.setattr("paceline.torch.backward.autograd.running_call", lambda: RunningCall.UNKNOWN)
    net = nn.Linear(4, 2)
    before = DistributedDataParallel(net, gradient_as_bucket_view=True)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    for _ in range(2):
        ddp.zero_grad()
        (ddp(torch.ones(1, 4)).sum() * (1 + rank)).backward()
        assert_close(net.bias.grad, torch.full((2,), 1.5))
    assert before._get_ddp_logging_data()["iteration"] == 0
    del before
    ddp(torch.ones(1, 4)).sum().backward()
    views = [p.grad for p in net.parameters()]
    ddp.zero_grad()
    ddp(torch.ones(1, 4)).sum().backward()
    assert [p.grad is view for p, view in zip(net.parameters(), views, strict=True)] == [True, True]
    loss = ddp(torch.ones(1, 4)).sum() * (1 + rank)
    del ddp
    net.zero_grad()
    loss.backward()
    assert_close(net.bias.grad, torch.full((2,), 1.5))
    assert not net.bias._post_accumulate_grad_hooks
