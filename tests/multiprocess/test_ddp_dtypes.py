"""Complex parameters, and models whose layers have different dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["memory", "group"]


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.bias = nn.Parameter(torch.randn(3))  # three floats in front of complex numbers
        self.mix = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x + self.bias).to(torch.complex64) @ self.mix
        # The gradient of a conjugate is a lazy conjugate: its memory has the values before conjugation.
        return (y.abs().square().sum(1) + (self.turn.conj() * x.sum()).real.square().sum()).mean()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_complex_parameters(rank: int, path: str) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(8))
    for view in (False, True):
        for hook in (None, default_hooks.allreduce_hook):
            net = Waves()
            alone = copy.deepcopy(net)
            ddp = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            for _ in range(2):
                ddp.zero_grad()
                alone.zero_grad()
                ddp(x[rank : rank + 1]).backward()
                ((alone(x[:1]) + alone(x[1:])) / 2).backward()
                for ours, expected in zip(net.parameters(), alone.parameters(), strict=True):
                    assert_close(ours.grad, expected.grad)
                square = sum(p.grad.abs().double().square().sum() for p in alone.parameters())
                assert_close(ddp.grad_norm(), float(square.sqrt()))


class Alternating(nn.Module):
    """Layers of two dtypes, in turn: buckets get complete in another order than they have in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        layers = [nn.Linear(4, 4, dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
        self.layers = nn.ModuleList([nn.Linear(4, 4), *layers, nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.square().mean()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_dtypes_in_turn(rank: int, path: str) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10))
    for cap_mb in (25, 0.0001):
        net = Alternating()
        alone = copy.deepcopy(net)
        ddp = DistributedDataParallel(net, reduce_through=path, bucket_cap_mb=cap_mb)
        for _ in range(2):
            ddp.zero_grad()
            alone.zero_grad()
            ddp(x[rank : rank + 1]).backward()
            ((alone(x[:1]) + alone(x[1:])) / 2).backward()
            for ours, expected in zip(net.parameters(), alone.parameters(), strict=True):
                assert_close(ours.grad, expected.grad)


WORLD = 2
