"""Several wrapped models: ranks use different parameters, or backwards raise and training continues.

Over a process group, the collectives of all models match by their order. In shared memory they need not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.errors import SkippedPassError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["group", "memory"]
WIDTHS = (3, 9, 5, 17)  # buckets of different sizes, so that mismatched collectives fail
SKIPPED = ((), (3, 1), (0,), (2, 3))


class Blocks(nn.Module):
    """Residual blocks; a forward can skip some of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in WIDTHS
        )

    def forward(self, x: torch.Tensor, skipped: Sequence[int] = ()) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number not in skipped:
                x = x + block(x)
        return x


def pair(path: str) -> tuple[list[Blocks], list[DistributedDataParallel]]:
    """Returns two models and their wrappers, with a bucket per parameter and unused parameters allowed."""
    models = [Blocks(1), Blocks(2)]
    wrapped = [
        DistributedDataParallel(each, bucket_cap_mb=1e-6, find_unused_parameters=True, reduce_through=path)
        for each in models
    ]
    return models, wrapped


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 + rank))


def check_mean(models: Sequence[nn.Module], loss: Callable[[Sequence[nn.Module], int], torch.Tensor]) -> None:
    """Compares gradients with those of one process that computes the losses of both ranks, in float64."""
    alone = [copy.deepcopy(each).double() for each in models]
    for each in alone:
        each.zero_grad()
    (sum(loss(alone, rank) for rank in range(2)) / 2).backward()
    for ours, expected in zip(models, alone, strict=True):
        found = [parameter.grad for parameter in ours.parameters()]
        wanted = [p.grad if p.grad is None else p.grad.float() for p in expected.parameters()]
        assert [g is None for g in found] == [g is None for g in wanted]
        assert_close([g for g in found if g is not None], [g for g in wanted if g is not None])


def joint(models: Sequence[nn.Module], rank: int, chained: bool = False) -> torch.Tensor:
    """A loss of both models, in which each rank skips other blocks."""
    x = inputs(rank).to(next(models[0].parameters()).dtype)
    first = models[0](x, SKIPPED[1 + rank])
    second = models[1](first if chained else x, SKIPPED[2 * rank])
    return second.square().mean() if chained else (first.square() + second.square()).mean()


def break_at(model: Blocks, block: int) -> Callable[[], None]:
    """Makes the next backward raise when it reaches a block. Returns a function that undoes this."""

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("in a hook")

    return model.blocks[block][0].weight.register_hook(fail).remove


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chained", [False, True])
@kept_ranks(2, group="gloo")
def test_ranks_use_different_parameters_of_two_models(rank: int, path: str, chained: bool) -> None:
    models, wrapped = pair(path)
    for _ in range(3):
        for each in models:
            each.zero_grad()
        joint(wrapped, rank, chained).backward()
        check_mean(models, lambda alone, of: joint(alone, of, chained))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("goes_on_with", ["the other", "both", "the forwards of before"])
@kept_ranks(2, group="gloo")
def test_a_backward_that_raises_at_different_places_on_each_rank(
    rank: int, path: str, goes_on_with: str
) -> None:
    models, wrapped = pair(path)
    joint(wrapped, rank).backward()  # from here on, the order of buckets is fixed
    kept = joint(wrapped, rank) if goes_on_with == "the forwards of before" else None
    repair = break_at(models[0], 2 * rank)
    with pytest.raises(MemoryError):
        wrapped[0](inputs(rank)).sum().backward()
    repair()
    for each in models:
        each.zero_grad()
    if goes_on_with == "the other":
        wrapped[1](inputs(rank)).sum().backward()
        check_mean(models[1:], lambda alone, of: alone[0](inputs(of).double()).sum())
        for each in models:
            each.zero_grad()
    (joint(wrapped, rank) if kept is None else kept).backward()
    check_mean(models, joint)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("broken", [0, 1])
@kept_ranks(2, group="gloo")
def test_a_backward_of_several_models_that_raises(rank: int, path: str, broken: int) -> None:
    models, wrapped = pair(path)
    joint(wrapped, rank).backward()
    repair = break_at(models[broken], 2 * rank)
    with pytest.raises(MemoryError):
        (wrapped[0](inputs(rank)) + wrapped[1](inputs(rank))).sum().backward()
    repair()
    for each in models:
        each.zero_grad()
    joint(wrapped, rank).backward()
    check_mean(models, joint)


@kept_ranks(2, group="gloo")
def test_an_interrupted_backward_ends_before_that_of_another_model(rank: int) -> None:
    models, wrapped = pair("group")
    joint(wrapped, rank).backward()
    repair = break_at(models[0], 2) if rank == 0 else lambda: None
    # Rank 1 raises when rank 0 begins a backward of the other model. That backward succeeds on both ranks.
    with pytest.raises(MemoryError if rank == 0 else SkippedPassError):
        wrapped[0](inputs(rank)).sum().backward()
    repair()
    for each in models:
        each.zero_grad()
    wrapped[1](inputs(rank)).sum().backward()
    check_mean(models[1:], lambda alone, of: alone[0](inputs(of).double()).sum())
    for each in models:
        each.zero_grad()
    joint(wrapped, rank).backward()
    check_mean(models, joint)
