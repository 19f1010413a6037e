"""DistributedDataParallel on a GPU: one rank over NCCL, and two ranks that share a GPU over Gloo.

NCCL refuses two ranks on one device; Gloo takes tensors of a GPU. Skipped where there is no GPU.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.errors import NonFiniteGradientError, UnusedParameterError
from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import Branches, gradients, share, train, two_layers

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(7))


def assert_trained_as(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert ours.device.type == DEVICE == ours.grad.device.type
        assert_close(ours.double().cpu(), theirs, rtol=1e-5, atol=1e-6)
        assert_close(ours.grad.double().cpu(), theirs.grad, rtol=1e-5, atol=1e-6)


@ranks(1, group="nccl", deadline_s=240)
def test_one_rank_over_nccl(rank: int) -> None:
    alone = two_layers().double()
    train(alone, batch().double())
    for view in (False, True):
        # "raise" has a single rank reduce its gradients as well.
        model = two_layers().to(DEVICE)
        ddp = DistributedDataParallel(
            model, device_ids=[torch.device(DEVICE, 0)], nonfinite="raise", gradient_as_bucket_view=view
        )
        assert ddp.gradient_path == "group"
        train(ddp, batch())  # on the CPU: forward moves it
        assert_trained_as(model, alone)
        with pytest.raises(NonFiniteGradientError, match="infinity or a NaN"):
            ddp(torch.full((1, 4), float("nan"))).sum().backward()


@ranks(2, group="gloo", deadline_s=240)
def test_two_ranks_share_a_gpu_over_gloo(rank: int) -> None:
    x = batch()
    own = share(x, rank, 2).to(DEVICE)
    alone = two_layers().double()
    train(alone, x.double())
    for view in (False, True):
        model = two_layers().to(DEVICE)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
        assert ddp.gradient_path == "group"
        train(ddp, own)
        assert_trained_as(model, alone)
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        assert ddp.grad_norm() == pytest.approx(norm, rel=1e-5)
        model.zero_grad()
        with ddp.no_sync():
            ddp(own).square().mean().backward()
            local = gradients(model)
        ddp(own).square().mean().backward()
        expected = copy.deepcopy(model)
        expected.zero_grad()
        expected(x.to(DEVICE)).square().mean().backward()
        for name, found in gradients(model).items():
            assert_close(found, 2 * expected.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
            assert not torch.equal(found, local[name])


@ranks(2, group="gloo", deadline_s=240)
def test_errors_on_a_gpu(rank: int) -> None:
    x = torch.ones(1, 3, device=DEVICE)
    model = Branches().to(DEVICE)
    del model.never
    ddp = DistributedDataParallel(model)
    with pytest.raises(UnusedParameterError, match=r"got no gradient"):
        ddp(x, "left" if rank else "right").sum().backward()
    ddp = DistributedDataParallel(two_layers().to(DEVICE))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = float("nan") if rank == 1 else 1.0
        ddp(torch.full((1, 4), value, device=DEVICE)).sum().backward()
    assert any("infinity or a NaN on rank 1 of 2" in str(warning.message) for warning in caught)
    assert set(ddp.nonfinite()) == {1}
