"""Modules that are rarely trained: scripted modules, and modules with unusual tensors or outputs."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import bits, share, train, two_layers

PATHS = ["group", "memory"]
WORLD = 2


def scripted(*, is_loaded: bool) -> Any:
    torch.manual_seed(1)
    module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    if is_loaded:
        file = io.BytesIO()
        torch.jit.save(module, file)
        file.seek(0)
        module = torch.jit.load(file)
    return module


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_scripted_module(rank: int, path: str, is_loaded: bool) -> None:
    alone, model = scripted(is_loaded=is_loaded).eval(), scripted(is_loaded=is_loaded).eval()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    ddp = DistributedDataParallel(model, reduce_through=path)
    train(alone, x)
    train(ddp, share(x, rank, WORLD))
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours, expected)
    model.train()
    ddp.zero_grad()
    two = ddp(x + rank), ddp(x - rank)
    for output in two:  # although the statistics have changed since the first forward
        output.square().sum().backward()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, bits(model))
    assert found[0] == found[1]


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.empty.sum()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_a_parameter_without_elements(rank: int, path: str, view: bool) -> None:
    alone, model = WithEmpty(), WithEmpty()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    train(alone, x)
    train(
        DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view),
        share(x, rank, WORLD),
    )
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours, expected)
    assert model.empty.grad is not None and model.empty.grad.shape == (0, 4)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(WORLD, group="gloo")
def test_buffers_that_are_conjugate_or_negative_views(rank: int, path: str) -> None:
    model = two_layers()
    value = torch.tensor([1 + 2j, 3 - 4j]) * (1 + rank)
    model.register_buffer("conjugate", value.conj())
    model.register_buffer("negative", value.clone().conj().imag)
    model.register_buffer("matrix", (value * torch.ones(3, 1)).conj()[:, :1])  # not contiguous
    ddp = DistributedDataParallel(model, reduce_through=path)

    def check(factor: int) -> None:
        assert model.conjugate.is_conj() and model.negative.is_neg()
        assert torch.equal(model.conjugate, factor * torch.tensor([1 - 2j, 3 + 4j]))
        assert torch.equal(model.negative, factor * torch.tensor([-2.0, 4.0]))
        assert torch.equal(model.matrix, factor * torch.full((3, 1), 1 - 2j))

    check(1)
    loss = ddp(torch.ones(2, 4)).sum()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer *= 3 + rank
    loss.backward()
    check(3)


@dataclass
class Linked:
    value: torch.Tensor
    itself: Any = None


class LinkedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()

    def forward(self, x: torch.Tensor) -> Linked:
        output = Linked(self.layers(x))
        output.itself = [output]
        return output


@kept_ranks(WORLD, group="gloo")
def test_an_output_that_refers_to_itself(rank: int) -> None:
    model = LinkedOutput()
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 4) * (1.0 + rank)).itself[0].value.sum().backward()
    assert_close(model.layers[2].bias.grad, torch.ones(2))
