"""Gradient norms that are reused from a backward, and the ranks and parameters with non-finite gradients."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.errors import ConfigError, UnusedParameterError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import Branches, gradients, two_layers

PATHS = ["group", "memory"]


def backward(ddp: DistributedDataParallel, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Runs a backward and returns copies of the mean gradients."""
    ddp.zero_grad()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    (ddp(x).sum() * scale).backward()
    return gradients(ddp.module)


def norm_of(means: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(mean.double().square().sum()) for mean in means.values()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_clipping_reuses_the_norm_of_the_backward(rank: int, path: str, view: bool, monkeypatch) -> None:
    ddp = DistributedDataParallel(
        two_layers(), reduce_through=path, gradient_as_bucket_view=view, bucket_cap_mb=0.0001
    )
    ddp.clip_grad_norm_(1.0)  # norms are reused from the second call on
    for max_norm in (0.5, 1e6, 2.0):
        means = backward(ddp)
        with monkeypatch.context() as patch:
            patch.setattr(nn.utils, "clip_grad_norm_", None)  # computing a norm would raise
            total = ddp.clip_grad_norm_(max_norm)
        assert float(total) == pytest.approx(norm_of(means), rel=1e-5)
        factor = min(1.0, max_norm / (norm_of(means) + 1e-6))
        for name, parameter in ddp.module.named_parameters():
            assert_close(parameter.grad, means[name] * factor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_the_norm_of_changed_gradients_is_computed_again(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    ddp.clip_grad_norm_(1.0)
    means = backward(ddp)
    ddp.module[2].weight.grad.mul_(3)
    means["2.weight"] *= 3
    assert float(ddp.clip_grad_norm_(1.0)) == pytest.approx(norm_of(means), rel=1e-5)
    assert float(ddp.clip_grad_norm_(9.0)) == pytest.approx(1.0, rel=1e-4)
    biggest = max(float(mean.abs().max()) for mean in backward(ddp).values())
    assert float(ddp.clip_grad_norm_(1.0, norm_type=math.inf)) == pytest.approx(biggest)


PAST_TORCH = {  # torch's version counters do not count these changes
    "data": lambda gradient: gradient.data.mul_(0.01),
    "numpy": lambda gradient: np.multiply(gradient.numpy(), 0.01, out=gradient.numpy()),
    "kernel": lambda gradient: ctypes.memset(gradient.data_ptr(), 0, gradient.nbytes),
    "set": lambda gradient: setattr(gradient, "data", gradient.detach() * 3),
}


@pytest.mark.parametrize("change", PAST_TORCH)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_the_norm_is_computed_again_after_changes_that_bypass_torch(
    rank: int, path: str, view: bool, change: str
) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, gradient_as_bucket_view=view)
    ddp.clip_grad_norm_(1.0)
    names = ("0.weight",) if change == "set" else ("0.weight", "2.bias")  # a moved view is refused
    for name in names:
        backward(ddp)
        PAST_TORCH[change](ddp.module.get_parameter(name).grad)
        now = gradients(ddp.module)
        assert float(ddp.clip_grad_norm_(0.5)) == pytest.approx(norm_of(now), rel=1e-5)
        assert norm_of(gradients(ddp.module)) == pytest.approx(min(0.5, norm_of(now)), rel=1e-4)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_the_norm_of_a_backward_that_raised_is_computed(rank: int, path: str) -> None:
    model = Branches()
    del model.never
    ddp = DistributedDataParallel(model, reduce_through=path, bucket_cap_mb=0.0001)
    ddp.clip_grad_norm_(1.0)
    for scale in (1.0, 1000.0, 1.0):  # statistics alternate between two slots, one per backward
        ddp.zero_grad()
        (ddp(torch.ones(1, 3), "both").sum() * scale).backward()
    ddp.zero_grad()
    with pytest.raises(UnusedParameterError):
        ddp(torch.ones(1, 3), "left" if rank else "both").sum().backward()
    assert math.isnan(ddp.grad_norm())
    assert float(ddp.clip_grad_norm_(1e9)) == pytest.approx(norm_of(own_gradients(model)), rel=1e-5)


def own_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: found for name, found in gradients(model).items() if found is not None}


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo", deadline_s=240)  # the first optimizer of a process is slow to create
def test_clipping_with_a_grad_scaler(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, nonfinite="ignore")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert scaler.scale(torch.ones(())) == 256
    for unscales in (True, False, False):
        means = backward(ddp)
        before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        backward(ddp, scale=256.0)
        if unscales:
            scaler.unscale_(optimizer)
            total = ddp.clip_grad_norm_(0.5)
        else:
            total = ddp.clip_grad_norm_(0.5, scaler=scaler)
        assert float(total) == pytest.approx(norm_of(means), rel=1e-4)
        scaler.step(optimizer)
        for name, parameter in ddp.module.named_parameters():
            assert_close(parameter, before[name] - means[name] * 0.5 / norm_of(means), rtol=1e-4, atol=1e-6)
        scaler.update()
    before = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    backward(ddp, scale=math.inf if rank else 256.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128.0  # on the rank with finite gradients, too
    for name, parameter in ddp.module.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
@pytest.mark.filterwarnings("ignore:The gradient holds")
def test_ranks_and_parameters_with_nonfinite_gradients(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, bucket_cap_mb=0.0001)
    backward(ddp, math.nan if rank == 1 else 1.0)
    assert ddp.nonfinite() == {1: ("0.weight", "0.bias", "2.weight", "2.bias")}
    backward(ddp)
    assert ddp.nonfinite() == {}
    silent = DistributedDataParallel(two_layers(), reduce_through=path, nonfinite="ignore")
    backward(silent)
    if path == "group":
        with pytest.raises(ConfigError, match="looks for none"):
            silent.nonfinite()


@kept_ranks(1, group="gloo")
def test_norm_and_nonfinite_of_a_single_rank(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    means = backward(ddp)
    assert float(ddp.clip_grad_norm_(0.5)) == pytest.approx(norm_of(means), rel=1e-5)
    backward(ddp, math.nan)
    assert ddp.nonfinite() == {0: ("0.weight", "0.bias", "2.weight", "2.bias")}
    ddp.sync_buffers()
    assert not ddp.will_sync_module_buffers()
