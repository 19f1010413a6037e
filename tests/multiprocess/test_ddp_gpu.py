"""DistributedDataParallel on a GPU: one rank over NCCL, and ranks that share a GPU over Gloo.

NCCL refuses two ranks on one device; Gloo accepts tensors of a GPU. Without a GPU, these tests run on a
simulated device if there is one (`tests.accelerator`), and are skipped otherwise. Hosts are simulated: ranks
that report different hosts share no memory.
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
from tests import accelerator
from tests.accelerator import GLOO, GLOO_AND_NCCL, NCCL
from tests.harness import ranks
from tests.multiprocess.ddp_models import Branches, gradients, share, train, two_layers
from tests.several_hosts import be_on_host

DEVICE = accelerator.KIND
pytestmark = accelerator.needed


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(7))


def assert_trained_as(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert ours.device.type == DEVICE == ours.grad.device.type
        assert_close(ours.double().cpu(), theirs, rtol=1e-5, atol=1e-6)
        assert_close(ours.grad.double().cpu(), theirs.grad, rtol=1e-5, atol=1e-6)


@ranks(1, group=NCCL, deadline_s=240)
def test_one_rank_over_nccl(rank: int) -> None:
    alone = two_layers().double()
    train(alone, batch().double())
    for view in (False, True):
        # With "raise", a single rank reduces its gradients, too.
        model = two_layers().to(DEVICE)
        ddp = DistributedDataParallel(
            model, device_ids=[torch.device(DEVICE, 0)], nonfinite="raise", gradient_as_bucket_view=view
        )
        assert ddp.gradient_path == "group"
        train(ddp, batch())  # on the CPU: forward moves it
        assert_trained_as(model, alone)
        with pytest.raises(NonFiniteGradientError, match="infinity or a NaN"):
            ddp(torch.full((1, 4), float("nan"))).sum().backward()


@ranks(2, group=GLOO, deadline_s=240)
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


@ranks(2, group=GLOO, deadline_s=240)
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


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def check_means_through_hosts(
    rank: int, world_size: int, num_hosts: int, device: torch.device, **options: object
) -> None:
    """Compares backwards over simulated hosts with one process that has the whole batch, in float64."""
    be_on_host(rank * num_hosts // world_size)
    accelerator.module().set_device(device)
    for view in (False, True):
        model = wide().to(device)
        ddp = DistributedDataParallel(
            model,
            reduce_through="hosts",
            bucket_cap_mb=0.005,
            gradient_as_bucket_view=view,
            timeout_s=60,
            **options,
        )
        assert ddp.gradient_path == "hosts" and ddp.bits == "engine"
        for step in range(4):
            x = torch.randn(4 * world_size, 40, generator=torch.Generator().manual_seed(step))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about TF32 on the GPU, for example
                model.zero_grad()
                ddp(x[rank::world_size].to(device)).square().mean().backward()
            alone = wide().double()
            alone(x.double()).square().mean().backward()
            for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
                assert_close(ours.grad.double().cpu(), expected.grad, rtol=1e-3, atol=1e-5)
        own = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()
        gathered: list[object] = [None] * world_size
        torch.distributed.all_gather_object(gathered, own.numpy().tobytes())
        assert len(set(gathered)) == 1


@pytest.mark.parametrize("compression", [None, "bf16"])
@ranks(4, group=GLOO, deadline_s=240)
def test_two_hosts_of_two_ranks_that_share_a_gpu_over_gloo(rank: int, compression: str | None) -> None:
    if compression is None:
        check_means_through_hosts(rank, 4, 2, torch.device(DEVICE, 0))
        return
    be_on_host(rank // 2)
    ddp = DistributedDataParallel(
        wide().to(DEVICE), reduce_through="hosts", compress_between_hosts=compression, timeout_s=60
    )
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.full((1, 40), float(rank), device=DEVICE)).sum().backward()
    assert_close(ddp.module[4].bias.grad, torch.ones(1, device=DEVICE), rtol=1e-2, atol=1e-2)


@ranks(2, group=GLOO_AND_NCCL, deadline_s=240)
def test_two_hosts_of_one_rank_share_a_gpu_over_nccl(rank: int) -> None:
    """NCCL within hosts of one rank each: checks its streams and copies on a single GPU."""
    # init_sync and broadcast_buffers would need NCCL between two ranks of one GPU.
    check_means_through_hosts(rank, 2, 2, torch.device(DEVICE, 0), init_sync=False, broadcast_buffers=False)


@ranks(2, group=GLOO_AND_NCCL, deadline_s=240)
def test_a_sum_between_hosts_that_overflows_is_reported(rank: int) -> None:
    """The sum overflows although each gradient and their mean are finite."""
    be_on_host(rank)
    ddp = DistributedDataParallel(
        nn.Linear(2, 1, bias=False).to(DEVICE),
        reduce_through="hosts",
        nonfinite="raise",
        init_sync=False,
        broadcast_buffers=False,
        timeout_s=60,
    )
    for size in (1.0, 3e38, 1.0):
        ddp.zero_grad()
        loss = ddp(torch.full((1, 2), size, device=DEVICE)).sum()
        if size == 1.0:
            loss.backward()
            assert_close(ddp.module.weight.grad.cpu(), torch.ones(1, 2))
        else:
            with pytest.raises(NonFiniteGradientError, match="overflow"):
                loss.backward()


@pytest.mark.skipif(accelerator.count() < 4, reason="needs four GPUs")
@ranks(4, group=NCCL, deadline_s=240)
def test_two_hosts_of_two_gpus_over_nccl(rank: int) -> None:
    check_means_through_hosts(rank, 4, 2, torch.device(DEVICE, rank))
