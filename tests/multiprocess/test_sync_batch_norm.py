"""SyncBatchNorm on the CPU against torch's batch norm of the whole batch in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.errors import DeadlineError, MismatchError
from paceline.torch import DistributedDataParallel, SyncBatchNorm
from tests.harness import kept_ranks

SIZES = [[3, 3], [5, 1], [6, 0]]


def own_rows(x: torch.Tensor, sizes: list[int], rank: int) -> torch.Tensor:
    return x.split(sizes)[rank]


def reference_shape(x: torch.Tensor) -> torch.Tensor:
    """Return (N, C) or (N, C, L): the shape of the other dimensions does not change the statistics."""
    return x.flatten(2) if x.dim() > 2 else x


def check(group: Any, rank: int) -> None:
    """Compare three training steps and an evaluation, for several shapes, sizes and options."""
    for shape, options in [((4,), {}), ((4, 3, 2), {"momentum": None}), ((4, 5), {"affine": False})]:
        for sizes in SIZES:
            torch.manual_seed(3)
            whole = nn.BatchNorm1d(4, **options).double()
            x = (torch.randn(6, *shape, dtype=torch.float64) * 2 + 100).requires_grad_()
            weights = torch.randn(x.shape, dtype=torch.float64)
            ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole), group)
            own_x = own_rows(x.detach(), sizes, rank).clone().requires_grad_()
            for _ in range(3):
                expected = whole(reference_shape(x)).view(x.shape)
                out = ours(own_x)
                assert_close(out, own_rows(expected, sizes, rank))
                (expected * weights).sum().backward()
                (out * own_rows(weights, sizes, rank)).sum().backward()
            assert_close(own_x.grad, own_rows(x.grad, sizes, rank), rtol=1e-6, atol=1e-9)
            assert_close(ours.running_mean, whole.running_mean)
            assert_close(ours.running_var, whole.running_var)
            assert ours.num_batches_tracked == 3
            evaluated = whole.eval()(reference_shape(x)).view(x.shape)
            assert_close(ours.eval()(own_x), own_rows(evaluated, sizes, rank))


@kept_ranks(2)
def test_over_a_paceline_group(group: Any) -> None:
    check(group, group.rank)


@kept_ranks(2, group="gloo")
def test_over_a_torch_group(rank: int) -> None:
    check(None, rank)


@kept_ranks(2, group="gloo")
def test_parameters_train_like_in_one_process(rank: int) -> None:
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 1)).double()
    ours = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)))
    x = torch.randn(6, 2, 4, 4).double()
    ours(x.chunk(2)[rank]).square().mean().backward()
    whole(x).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


@kept_ranks(2, group="gloo")
def test_second_derivatives(rank: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    own = x.detach().chunk(2)[rank].clone().requires_grad_()
    whole = nn.BatchNorm1d(2).double()
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    for module, value in ((whole, x), (ours, own)):
        (slope,) = torch.autograd.grad(module(value).pow(3).sum(), value, create_graph=True)
        slope.square().sum().backward()
    assert_close(own.grad, x.grad.chunk(2)[rank])


@kept_ranks(2, group="gloo")
def test_sixteen_bits_and_a_single_value(rank: int) -> None:
    norm = SyncBatchNorm(2)
    out = norm(torch.full((1, 2), 1.0 + 2 * rank, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), torch.full((1, 2), 2.0 * rank - 1), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.ones(1 - rank, 2))


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
@pytest.mark.parametrize("call", ["finish", "sync_buffers", "backward"])
@kept_ranks(2, group="gloo")
def test_a_rank_in_another_call_than_the_norm_raises_at_once(rank: int, backend: str, call: str) -> None:
    """The rank in the norm raises too; a deadline would blame one of them."""
    group = dist.new_group(backend=backend)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    ddp = DistributedDataParallel(
        SyncBatchNorm.convert_sync_batchnorm(model, group), process_group=group, timeout_s=60
    )
    x = torch.randn(4, 2)
    for _ in range(2):
        ddp(x).sum().backward()
    loss = ddp(x).sum() if call == "backward" else None
    with pytest.raises((DeadlineError, MismatchError)) as caught:
        if rank == 1:
            ddp(x)
        elif loss is not None:
            loss.backward()
        else:
            getattr(ddp, call)()
    if isinstance(caught.value, DeadlineError):
        assert caught.value.late == ()
        assert "wait for each other in different calls" in str(caught.value)


def test_on_one_rank_it_is_batch_norm_and_conversion_keeps_everything() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.BatchNorm1d(3, affine=False).eval())})
    names = list(model.state_dict())
    x = torch.randn(4, 3)
    expected = copy.deepcopy(shared)(x)
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert list(converted.state_dict()) == names
    assert converted["a"] is converted["b"][0] and converted["a"].weight is shared.weight
    assert isinstance(converted["b"][1], nn.SyncBatchNorm) and not converted["b"][1].training
    assert torch.equal(converted["a"](x), expected)
    assert SyncBatchNorm(3)(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)
