"""A step with gradients that torch.autograd.grad() returned is reported; other uses of it are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

BATCH = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
PATHS = ["memory", "group"]


def wrapped(**arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), **arguments)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def share(rank: int) -> torch.Tensor:
    return BATCH[rank * 4 : rank * 4 + 4]


def step_with(ddp: Any, optimizer: torch.optim.Optimizer, found: Any) -> None:
    for p, g in zip(ddp.parameters(), found, strict=True):
        p.grad = g
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ordinary_steps", [0, 2])
@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
@kept_ranks(2, group="gloo")
def test_a_step_with_own_gradients_is_reported_once(
    rank: int, by_hand: bool, ordinary_steps: int, path: str
) -> None:
    ddp, optimizer = wrapped(reduce_through=path)
    for _ in range(ordinary_steps):
        ddp(share(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        found = torch.autograd.grad(ddp(share(rank)).square().mean(), list(ddp.parameters()))
        if not by_hand:
            step_with(ddp, optimizer, found)
            return
        with torch.no_grad():
            for p, g in zip(ddp.parameters(), found, strict=True):
                p -= 0.1 * g

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    with pytest.warns(
        RuntimeWarning, match=r"(?s)autograd\.grad\(\), which averages nothing.*backward\(\)"
    ) as caught:
        for _ in range(3):
            step()
    assert len(caught) == 1


@kept_ranks(2, group="gloo")
def test_such_a_step_before_a_join_is_reported(rank: int) -> None:
    ddp, optimizer = wrapped()
    found = torch.autograd.grad(ddp(share(rank)).square().mean(), list(ddp.parameters()))
    step_with(ddp, optimizer, found)
    with ddp.join(), pytest.warns(RuntimeWarning, match=r"autograd\.grad\(\), which averages nothing"):
        ddp(share(rank))


def averaged_by_the_program(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    found = torch.autograd.grad(ddp(x).square().mean(), list(ddp.parameters()))
    for g in found:
        dist.all_reduce(g)
    step_with(ddp, optimizer, [g / 2 for g in found])


def second_order(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    loss = ddp(x).square().mean()
    found = torch.autograd.grad(loss, list(ddp.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in found)).backward()
    optimizer.step()


def penalty_on_inputs(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
    (found.square().sum() + ddp(x).mean()).backward()
    optimizer.step()


def attack(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(ddp(x).sum(), x)
    ddp(x.detach() + 0.1 * found.sign()).square().mean().backward()
    optimizer.step()


def inner_loop(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    parameters = dict(ddp.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(ddp, parameters, (x,)).square().mean()
        found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        parameters = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), found, strict=True)}
    (torch.func.functional_call(ddp, parameters, (x,)).square().mean() + 0 * ddp(x).sum()).backward()
    optimizer.step()


def norms_of_tasks(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    y = ddp(x)
    losses = [y.square().mean(), y.abs().mean()]
    for loss in losses:
        torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)
    sum(losses).backward()
    optimizer.step()


def looked_at_before_the_step(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    ddp(x).square().mean().backward()
    torch.autograd.grad(2 * ddp(x).mean(), list(ddp.parameters()))
    optimizer.step()


def in_evaluation(ddp: Any, optimizer: Any, x: torch.Tensor) -> None:
    ddp(x).square().mean().backward()
    optimizer.step()
    ddp.eval()
    x = x.clone().requires_grad_()
    torch.autograd.grad(ddp(x).mean(), x)
    ddp.train()


@pytest.mark.parametrize(
    "step",
    [
        averaged_by_the_program,
        second_order,
        penalty_on_inputs,
        attack,
        inner_loop,
        norms_of_tasks,
        looked_at_before_the_step,
        in_evaluation,
    ],
)
@kept_ranks(2, group="gloo")
def test_other_uses_are_not_reported(rank: int, step: Callable[..., None]) -> None:
    ddp, optimizer = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.zero_grad()
            step(ddp, optimizer, share(rank).clone())
        ddp.check_replicas()
