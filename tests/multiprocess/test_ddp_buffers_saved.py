"""Buffers that autograd has saved for a later backward, and that the end of another one synchronises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["group", "memory"]
POLICIES = ["broadcast", "average"]
WORLD = 2


class Scaled(nn.Module):
    """Divides by a moving average of what it has seen, which autograd saves for backward."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        if self.training:
            self.scale = 0.5 * self.scale + hidden.detach().abs().mean(0)
        return self.head(torch.tanh(hidden / self.scale))


def with_norm(norm: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)
    normalised = nn.Sequential(nn.Unflatten(1, (2, 3)), norm(2, track_running_stats=True), nn.Flatten())
    return nn.Sequential(nn.Linear(4, 6), normalised, nn.LeakyReLU(), nn.Linear(6, 2))


def batch(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_saved_buffer_that_changes_raises_autograds_own_error(rank: int, path: str, policy: str) -> None:
    alone, model = Scaled(), Scaled()
    ddp = DistributedDataParallel(model, reduce_through=path, buffers={"*": policy})
    output, expected = ddp(batch(rank)), alone(batch(rank))
    output.square().mean().backward(retain_graph=True)
    if rank == 0 and policy == "broadcast":  # rank 0 keeps its own values
        (found,) = torch.autograd.grad(output[:, 0].sum(), model.linear.weight)
        assert_close(found, torch.autograd.grad(expected[:, 0].sum(), alone.linear.weight)[0])
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(output[:, 0].sum(), model.linear.weight)
    ddp(batch(rank, 1)).sum().backward()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_saved_buffer_that_keeps_its_bits_can_be_used_again(rank: int, path: str, policy: str) -> None:
    """The buffer has NaNs, which no comparison calls equal, and is not contiguous."""
    model, alone = Scaled().eval(), Scaled().eval()
    for each in (model, alone):
        each.scale = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [torch.nan, 0.0]])[:, 0]
    options = {"reduce_through": path, "buffers": {"*": policy}}
    ddp = DistributedDataParallel(model, nonfinite="ignore", **options)
    output, expected = ddp(batch(rank)), alone(batch(rank))
    for _ in range(2):
        output[:, 0].sum().backward(retain_graph=True)
    (found,) = torch.autograd.grad(output[:, 0].sum(), model.linear.weight)
    assert_close(found, torch.autograd.grad(expected[:, 0].sum(), alone.linear.weight)[0], equal_nan=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_running_statistics_let_a_graph_be_used_again(
    rank: int, path: str, norm: type[nn.Module], policy: str
) -> None:
    """As the discriminator of a GAN does, with two forwards before its two backwards."""
    model = with_norm(norm)
    alone = [copy.deepcopy(model) for _ in range(WORLD)]
    ddp = DistributedDataParallel(model, reduce_through=path, buffers={"*": policy})
    for number in range(3):
        for module in (ddp, *alone):
            module.zero_grad()
        real, fake = ddp(batch(rank, 2 * number)), ddp(batch(rank, 2 * number + 1))
        real.mean().backward()
        fake.square().mean().backward(retain_graph=True)
        (found,) = torch.autograd.grad(fake.sum(), model[0].weight)
        for each, module in enumerate(alone):
            outputs = [module(batch(each, 2 * number + part)) for part in range(2)]
            outputs[0].mean().backward()
            outputs[1].square().mean().backward(retain_graph=True)
            if each == rank:
                assert_close(found, torch.autograd.grad(outputs[1].sum(), module[0].weight)[0])
        for ours, *theirs in zip(model.parameters(), *(module.parameters() for module in alone)):
            assert_close(ours.grad, sum(each.grad for each in theirs) / WORLD)
