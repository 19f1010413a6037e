"""Several wrapped models whose ranks use other parameters, or whose backwards raise, and then go on.

Over a process group the calls of all models pair by their order; in the memory of a host they need not.
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
WIDTHS = (3, 9, 5, 17)  # buckets of other sizes: calls that do not pair cannot pass for others
SKIPPED = ((), (3, 1), (0,), (2, 3))


class Blocks(nn.Module):
    """Blocks, of which a forward can skip some."""

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
    """Two models, and both wrapped: a bucket for each parameter, which may be unused."""
    models = [Blocks(1), Blocks(2)]
    wrapped = [
        DistributedDataParallel(each, bucket_cap_mb=1e-6, find_unused_parameters=True, reduce_through=path)
        for each in models
    ]
    return models, wrapped


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 + rank))


def check_mean(models: Sequence[nn.Module], loss: Callable[[Sequence[nn.Module], int], torch.Tensor]) -> None:
    """Compare gradients with those of one process that makes the losses of both ranks, in float64."""
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
    """A loss of both models, of which this rank skips blocks."""
    x = inputs(rank).to(next(models[0].parameters()).dtype)
    first = models[0](x, SKIPPED[1 + rank])
    second = models[1](first if chained else x, SKIPPED[2 * rank])
    return second.square().mean() if chained else (first.square() + second.square()).mean()


def break_at(model: Blocks, block: int) -> Callable[[], None]:
    """Let the next backward raise when it comes to a block. Returns what mends it."""

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("in a hook")

    return model.blocks[block][0].weight.register_hook(fail).remove


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chained", [False, True])
@kept_ranks(2, group="gloo")
def test_ranks_use_other_parameters_of_models_in_one_backward(rank: int, path: str, chained: bool) -> None:
    models, wrapped = pair(path)
    for _ in range(3):
        for each in models:
            each.zero_grad()
        joint(wrapped, rank, chained).backward()
        check_mean(models, lambda alone, of: joint(alone, of, chained))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("goes_on_with", ["the other", "both", "the forwards of before"])
@kept_ranks(2, group="gloo")
def test_a_backward_that_raised_at_another_place_on_each_rank(
    rank: int, path: str, goes_on_with: str
) -> None:
    models, wrapped = pair(path)
    joint(wrapped, rank).backward()  # the order of buckets is final
    kept = joint(wrapped, rank) if goes_on_with == "the forwards of before" else None
    mend = break_at(models[0], 2 * rank)
    with pytest.raises(MemoryError):
        wrapped[0](inputs(rank)).sum().backward()
    mend()
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
def test_a_backward_of_several_models_that_raised(rank: int, path: str, broken: int) -> None:
    models, wrapped = pair(path)
    joint(wrapped, rank).backward()
    mend = break_at(models[broken], 2 * rank)
    with pytest.raises(MemoryError):
        (wrapped[0](inputs(rank)) + wrapped[1](inputs(rank))).sum().backward()
    mend()
    for each in models:
        each.zero_grad()
    joint(wrapped, rank).backward()
    check_mean(models, joint)


@kept_ranks(2, group="gloo")
def test_a_backward_that_one_rank_broke_off_is_given_up_before_that_of_another_model(rank: int) -> None:
    models, wrapped = pair("group")
    joint(wrapped, rank).backward()
    mend = break_at(models[0], 2) if rank == 0 else lambda: None
    # Rank 1 has its error when rank 0 begins a backward of the other model, which is good on both.
    with pytest.raises(MemoryError if rank == 0 else SkippedPassError):
        wrapped[0](inputs(rank)).sum().backward()
    mend()
    for each in models:
        each.zero_grad()
    wrapped[1](inputs(rank)).sum().backward()
    check_mean(models[1:], lambda alone, of: alone[0](inputs(of).double()).sum())
    for each in models:
        each.zero_grad()
    joint(wrapped, rank).backward()
    check_mean(models, joint)
