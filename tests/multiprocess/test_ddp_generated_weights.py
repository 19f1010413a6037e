"""Modules that compute weights in forward and store them in place of parameters, such as hypernetworks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["group", "memory"]


class Hypernetwork(nn.Module):
    """The weight of its middle layer is the output of another layer."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.generator = nn.Linear(3, 8)
        self.embedding = nn.Parameter(torch.randn(3))
        self.target = nn.Linear(4, 2)
        self.target._parameters["weight"] = None
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.target._parameters["weight"] = self.generator(self.embedding).view(2, 4)
        return self.head(self.target(x))


class WeightDrop(nn.Module):
    """fastai's WeightDrop: a layer runs with dropout on its weight, which is stored under another name."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.raw = nn.Parameter(self.layer._parameters.pop("weight").detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer._parameters["weight"] = F.dropout(self.raw, p=0.5, training=self.training)
        return self.layer(x)


MODELS = [Hypernetwork, WeightDrop]


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def leaves(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if isinstance(p, nn.Parameter)]


def clear(model: nn.Module) -> None:
    """Clears gradients without zero_grad(), which warns about the computed weights."""
    for parameter in leaves(model):
        parameter.grad = None


def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    torch.manual_seed(number)  # the same dropout mask everywhere
    return model(batch(rank, number)).square().mean()


def means(alone: nn.Module, numbers: list[int], weights: tuple[float, float] = (1.0, 1.0)) -> list[Any]:
    """Returns the expected .grad after the ranks have run backward for these batches."""
    clear(alone)
    for rank, weight in enumerate(weights):
        for number in numbers:
            (weight * loss(alone, rank, number) / sum(weights)).backward()
    return [p.grad for p in leaves(alone)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_accumulated_gradients_are_averaged(rank: int, path: str, model: type[nn.Module]) -> None:
    alone = model()
    ddp = DistributedDataParallel(model(), reduce_through=path)
    for number in range(3):
        clear(ddp.module)
        with ddp.no_sync():
            loss(ddp, rank, 2 * number).backward()
        loss(ddp, rank, 2 * number + 1).backward()
        for ours, expected in zip(leaves(ddp.module), means(alone, [2 * number, 2 * number + 1])):
            assert_close(ours.grad, expected)


@pytest.mark.parametrize("model", MODELS)
@kept_ranks(2, group="gloo")
def test_weighted_backwards_are_averaged(rank: int, model: type[nn.Module]) -> None:
    alone = model()
    ddp = DistributedDataParallel(model(), weight=lambda x: 1.0 + 2 * rank)
    for number in range(3):
        clear(ddp.module)
        loss(ddp, rank, number).backward()
        for ours, expected in zip(leaves(ddp.module), means(alone, [number], (1.0, 3.0))):
            assert_close(ours.grad, expected)


@kept_ranks(2, group="gloo")
def test_ranks_with_different_numbers_of_batches_join(rank: int) -> None:
    ddp = DistributedDataParallel(Hypernetwork())
    loss(ddp, rank, 9).backward()
    with ddp.join():
        for number in range(2 + rank):
            clear(ddp.module)
            loss(ddp, rank, number).backward()
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, [p.grad.tolist() for p in leaves(ddp.module)])
    assert found[0] != found[1]  # rank 0 had no third batch


@kept_ranks(2, group="gloo")
def test_a_parameter_added_beside_generated_weights_is_refused(rank: int) -> None:
    ddp = DistributedDataParallel(Hypernetwork())
    loss(ddp, rank, 0).backward()
    ddp.module.extra = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"added: extra\.weight, extra\.bias"):
        loss(ddp, rank, 1)


@kept_ranks(2, group="gloo")
def test_a_frozen_layer_beside_generated_weights_gets_no_gradient(rank: int) -> None:
    alone = Hypernetwork()
    ddp = DistributedDataParallel(Hypernetwork())
    for frozen in (False, True, False):
        for module in (alone, ddp.module):
            module.head.requires_grad_(not frozen)
            clear(module)
        loss(ddp, rank, 0).backward()
        for ours, expected in zip(leaves(ddp.module), means(alone, [0])):
            assert (ours.grad is None) == (expected is None)
            if expected is not None:
                assert_close(ours.grad, expected)


@kept_ranks(2, group="gloo")
def test_a_model_wrapped_after_its_first_forward(rank: int) -> None:
    """The generated weight is already in the parameter's place when the model is wrapped."""
    alone, model = Hypernetwork(), Hypernetwork()
    loss(model, rank, 5)
    ddp = DistributedDataParallel(model)
    for number in range(2):
        clear(ddp.module)
        loss(ddp, rank, number).backward()
        for ours, expected in zip(leaves(model), means(alone, [number])):
            assert_close(ours.grad, expected)


@kept_ranks(2, group="gloo")
def test_functional_calls_with_some_tensors_replaced(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2), find_unused_parameters=True)
    given = {"module.bias": torch.ones(2, requires_grad=True)}
    for number in range(2):
        clear(ddp.module)
        torch.func.functional_call(ddp, given, (batch(rank, number),)).sum().backward()
        sums = [batch(each, number).sum(0) for each in range(2)]
        assert_close(ddp.module.weight.grad, (sum(sums) / 2).expand(2, 4))


@kept_ranks(2, group="gloo")
def test_transforms_of_functional_calls_with_some_tensors_replaced(rank: int) -> None:
    """Transforms run on one rank only; their gradients are not averaged."""
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    x = batch(rank, 0)

    def total(bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(ddp, {"module.bias": bias}, (x,)).sum()

    if rank == 0:
        assert_close(torch.func.grad(total)(torch.ones(2)), torch.full((2,), 3.0))
        assert torch.vmap(total)(torch.ones(5, 2)).shape == (5,)
    ddp(batch(rank, 1)).sum().backward()
    assert_close(ddp.module.bias.grad, torch.full((2,), 3.0))
