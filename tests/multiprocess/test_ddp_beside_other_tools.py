"""Weight averaging, torch.func and distributed checkpoints work with the wrapper as in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import share, train, two_layers

PATHS = ["group", "memory"]


@dataclass
class Output:
    loss: torch.Tensor
    parts: list[dict[str, torch.Tensor]]
    name: str = "output"


class Tied(nn.Module):
    """Embedding and head share one parameter; modules are nested; outputs are nested in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4)})["a"])]
        )
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Output:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + self.frozen(block(hidden))
        logits = self.head(hidden)
        return Output(logits.square().mean(), [{"logits": logits}])


def several_forwards(model: nn.Module, x: torch.Tensor) -> None:
    (model(x).loss + model(x.flip(1)).loss * 2).backward()


def twice_through_one_graph(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).loss
    loss.backward(retain_graph=True)
    loss.backward()


def after_autograd_grad(model: nn.Module, x: torch.Tensor) -> None:
    output = model(x)
    torch.autograd.grad(output.loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True)
    output.parts[0]["logits"].square().mean().backward()


def two_losses_of_one_forward(model: nn.Module, x: torch.Tensor) -> None:
    output = model(x)
    output.loss.backward(retain_graph=True)
    output.parts[0]["logits"].mean().backward()


def accumulated_with_no_sync_around_backward(model: nn.Module, x: torch.Tensor) -> None:
    loss = model(x).loss
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            loss.backward()
    else:
        loss.backward()
    model(x.flip(1)).loss.backward()


SCENARIOS: list[Callable[[nn.Module, torch.Tensor], None]] = [
    several_forwards,
    twice_through_one_graph,
    after_autograd_grad,
    two_losses_of_one_forward,
    accumulated_with_no_sync_around_backward,
]


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_gradients_are_those_of_the_whole_batch(rank: int, path: str) -> None:
    torch.manual_seed(3)
    model = Tied()
    x = torch.randint(6, (4, 3), generator=torch.Generator().manual_seed(5))
    for view in (False, True):
        ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
        for scenario in SCENARIOS:
            alone = copy.deepcopy(model).double()
            alone.zero_grad()
            scenario(alone, x)
            for _ in range(2):
                model.zero_grad()
                scenario(ddp, share(x, rank, 2))
            for (name, ours), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
                if ours.requires_grad:
                    found = ours.grad.double()
                    assert_close(
                        found, expected.grad, rtol=1e-5, atol=1e-6, msg=f"{scenario.__name__} {name}"
                    )
        del ddp


@kept_ranks(2, group="gloo", deadline_s=240)  # torch.optim makes torch import its compiler
def test_averages_of_weights(rank: int) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    ddp = DistributedDataParallel(two_layers())
    x = torch.full((2, 4), 1.0 + rank)
    alone = two_layers()
    for averaging in (None, get_ema_multi_avg_fn(0.5)):
        ours = AveragedModel(ddp, multi_avg_fn=averaging)
        expected = AveragedModel(alone, multi_avg_fn=averaging)
        for _ in range(2):
            train(ddp, x, steps=1)
            alone.load_state_dict(ddp.module.state_dict())
            ours.update_parameters(ddp)
            expected.update_parameters(alone)
        if rank == 0:  # evaluates alone, with gradients on by mistake
            assert_close(ours.eval()(x), expected.eval()(x))
    assert_close(ours.module.module.state_dict(), expected.module.state_dict())


@kept_ranks(2, group="gloo")
def test_torch_func(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    x = torch.full((2, 4), 1.0 + rank)
    parameters = {name: p.detach() for name, p in ddp.named_parameters()}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(ddp, given, (x,)).sum()

    found = torch.func.grad(loss)(parameters)
    assert_close(found["module.2.bias"], torch.full((2,), 2.0))
    stacked = {name: torch.stack([p, 2 * p]) for name, p in parameters.items()}
    assert torch.vmap(loss)(stacked).shape == (2,)
    assert ddp.module[2].bias.grad is None
    train(ddp, x)


@kept_ranks(2, group="gloo", deadline_s=240)
def test_distributed_checkpoints(rank: int, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    x = torch.full((2, 4), 1.0 + rank)
    ddp = DistributedDataParallel(two_layers())
    train(ddp, x)
    state: dict[str, Any] = get_model_state_dict(ddp)
    assert set(state) == set(ddp.module.state_dict())  # without the wrapper's prefix
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.9's own
        dcp.save(state, checkpoint_id=tmp_path)
    other = DistributedDataParallel(two_layers())
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_model_state_dict(other, loaded)
    for ours, expected in zip(other.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(ours, expected)
    train(other, x)
