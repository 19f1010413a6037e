"""The weighted mean of ragged batches and micro-batches against one process in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.errors import ConfigError, NonFiniteGradientError
from paceline.reducer.call_order import call_order_of
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import Blocked, Branches, two_layers

PATHS = ["group", "memory"]
# Numbers of samples, as [step][rank][micro-batch].
RAGGED = [
    [[3, 1, 7], [2, 0, 5]],
    [[1], [6]],
    [[0, 0], [0, 4]],
    [[0, 2], [1, 1]],
]


def cut(x: torch.Tensor, sizes: list[list[int]]) -> list[list[torch.Tensor]]:
    """Splits the rows of x into each rank's micro-batches."""
    parts = iter(x.split([size for row in sizes for size in row]))
    return [[next(parts) for _ in row] for row in sizes]


def mean_loss(output: torch.Tensor) -> torch.Tensor:
    """Is NaN for an empty batch, like losses averaged over tokens."""
    return (output**2).mean()


def reference(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    alone = copy.deepcopy(model).double()
    alone.zero_grad()
    mean_loss(alone(x.double())).backward()
    return {name: p.grad for name, p in alone.named_parameters()}


def step(ddp: DistributedDataParallel, batches: list[torch.Tensor], scoped: bool) -> None:
    def micro_batch(batch: torch.Tensor) -> None:
        loss = mean_loss(ddp(batch))
        if scoped:
            with ddp.weight(len(batch)):
                loss.backward()
        else:
            ddp.weight(torch.tensor(len(batch)))
            loss.backward()

    with ddp.no_sync():
        for batch in batches[:-1]:
            micro_batch(batch)
    micro_batch(batches[-1])


def assert_mean(ddp: DistributedDataParallel, expected: dict[str, torch.Tensor]) -> None:
    for name, parameter in ddp.module.named_parameters():
        assert_close(parameter.grad.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.filterwarnings("error")
@kept_ranks(2, group="gloo")
def test_ragged_micro_batches_equal_one_process_in_float64(rank: int, path: str, view: bool) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
    )
    generator = torch.Generator().manual_seed(3)
    for scoped in (True, False):
        for sizes in RAGGED:
            x = torch.randn(sum(map(sum, sizes)), 4, generator=generator)
            expected = reference(model, x)
            model.zero_grad()
            step(ddp, cut(x, sizes)[rank], scoped)
            assert_mean(ddp, expected)
            norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
            assert ddp.grad_norm() == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_micro_batches_of_weight_0_add_nothing_at_any_position(rank: int, view: bool) -> None:
    ddp = DistributedDataParallel(two_layers(), gradient_as_bucket_view=view)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))
    expected = reference(ddp.module, x)
    for void in (torch.full((2, 4), torch.nan), torch.ones(2, 4)):
        for begin in range(3):  # before, between and after the micro-batches with a weight
            ddp.zero_grad()
            parts = [(x[:1], 1), (x[1:], 2)] if rank else [(x[:1], 0), (x[:1], 0)]
            parts.insert(begin, (void, 0))
            with ddp.no_sync():
                for part, weight in parts[:-1]:
                    with ddp.weight(weight):
                        mean_loss(ddp(part)).backward()
            with ddp.weight(parts[-1][1]):
                mean_loss(ddp(parts[-1][0])).backward()
            assert_mean(ddp, expected)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_the_weight_may_be_computed_from_the_inputs(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, weight=lambda x, scale=1: len(x))
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(3))
    share = cut(x, [[2], [5]])[rank][0]
    expected = reference(ddp.module, x)
    mean_loss(ddp(share)).backward()
    assert_mean(ddp, expected)
    ddp.zero_grad()
    parts = share.split(1 + 2 * rank)  # the weights of several forwards before a backward add up
    losses = [mean_loss(ddp(part)) * len(part) for part in parts]
    (torch.stack(losses).sum() / len(share)).backward()
    assert_mean(ddp, expected)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_constant_weight_and_none_at_all(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, weight=1 + 2 * rank)
    x = torch.full((1, 4), 1.0 + rank)
    ddp(x).sum().backward()
    assert_close(ddp.module[0].bias.grad / ddp.module[2].bias.grad[0], ddp.module[0].bias.grad)
    assert_close(ddp.module[2].bias.grad, torch.ones(2))
    ddp.zero_grad()
    ddp.weight(0)  # the weight is 0 on all ranks: gradients are zeros, not NaN
    ddp(x * torch.nan).sum().backward()
    assert all(not p.grad.any() for p in ddp.parameters())


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_only_a_weight_of_0_hides_a_nan(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, nonfinite="raise")
    x = torch.full((1, 4), torch.nan if rank else 1.0)
    ddp.weight(1 - rank)
    ddp(x).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in ddp.parameters())
    with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2"), ddp.weight(1):
        ddp(x).sum().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_unused_parameters_count_as_zeros_of_their_weight(rank: int, path: str) -> None:
    model = Branches()
    ddp = DistributedDataParallel(model, reduce_through=path, find_unused_parameters=True)
    x = torch.ones(1, 3)
    with ddp.no_sync(), ddp.weight(3):
        ddp(x, "left").sum().backward()
    with ddp.weight(1):
        ddp(x, "right").sum().backward()
    assert_close(model.left.bias.grad, torch.full((2,), 0.75))
    assert_close(model.right.bias.grad, torch.full((2,), 0.25))
    assert model.never.bias.grad is None


@kept_ranks(1, group="gloo")
def test_a_single_rank_weights_its_micro_batches(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    expected = reference(ddp.module, x)
    step(ddp, list(x.split([1, 3, 2])), scoped=True)
    assert_mean(ddp, expected)


@kept_ranks(2, group="gloo")
def test_autograd_grad_is_not_weighted(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    x = torch.ones(1, 4)
    with ddp.no_sync(), ddp.weight(5):
        ddp(x).sum().backward()
    with ddp.weight(2 + rank):
        (bias,) = torch.autograd.grad(ddp(x).sum(), ddp.module[2].bias, retain_graph=True)
        assert_close(bias, torch.ones(2))
        ddp(x).sum().backward()
    # The extra forward for autograd.grad() ran on all ranks.
    assert_close(ddp.module[2].bias.grad, torch.ones(2))


@kept_ranks(2, group="gloo")
def test_invalid_weights_are_refused(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    for wrong in (-1, math.nan, math.inf, "three", torch.ones(2)):
        with pytest.raises(ConfigError, match="a finite number, 0 or more"):
            ddp.weight(wrong)
    for wrong in (1e-300, 1e38):  # gradients would underflow or overflow
        with pytest.raises(ConfigError, match="expected 0, or from 1e-20 to 1e\\+20"):
            ddp.weight(wrong)
    with pytest.raises(ConfigError, match="a finite number, 0 or more"):
        DistributedDataParallel(two_layers(), weight=-2)
    x = torch.ones(1, 4)
    with ddp.no_sync():
        ddp(x).sum().backward()
    with pytest.raises(ConfigError, match="others have none"), ddp.weight(3):
        ddp(x).sum().backward()


@kept_ranks(2, group="gloo")
def test_after_a_refused_weight_other_models_may_communicate(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through="group")
    x = torch.ones(1, 4)
    with ddp.no_sync():
        ddp(x).sum().backward()
    with pytest.raises(ConfigError, match="others have none"), ddp.weight(3):
        ddp(x).sum().backward()
    assert call_order_of(ddp.process_group).is_turn_of("another model")


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_no_sync_around_the_backward_only(rank: int, path: str) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path)
    x = torch.ones(1, 4)
    bias = model[2].bias
    first = ddp(x).sum() * (1 + rank)
    with ddp.no_sync():
        first.backward(retain_graph=True)
    assert_close(bias.grad, torch.full((2,), 1.0 + rank))
    first.backward()  # the same forward again, outside no_sync(): 2 and 4 are averaged
    assert_close(bias.grad, torch.full((2,), 3.0))
    model.zero_grad()
    with ddp.no_sync():
        inside = ddp(x).sum() * (1 + rank)
    inside.backward()  # as in torch, a forward in no_sync() is enough
    assert_close(bias.grad, torch.full((2,), 1.0 + rank))
    ddp(x).sum().backward()
    assert_close(bias.grad, torch.full((2,), 2.5))


class MayBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, blocks: bool) -> torch.Tensor:
        hidden = self.a * x
        return self.b * (Blocked.apply(hidden) if blocks else hidden)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_an_undefined_gradient_counts_as_zeros_of_its_weight(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(MayBlock(), reduce_through=path)
    x = torch.tensor([1.0 + rank])
    with ddp.no_sync():
        for blocks in (False, True):
            with ddp.weight(1):
                ddp(x, blocks).sum().backward()
    with ddp.weight(2):
        ddp(x, False).sum().backward()
    assert_close(ddp.module.a.grad, torch.tensor([1.5 * 3 / 4]))
    assert_close(ddp.module.b.grad, torch.tensor([1.5]))
