"""Manual finalization of backwards, an option of torch's DDP since 2.15.

Paceline offers it with any torch; where torch has it, its DDP is the reference.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import two_layers

NAME = "require_manual_backward_finalization"
paths = pytest.mark.parametrize("reduce_through", ["memory", "group"])


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def means(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Gradients of one process that has the batches of both ranks, in float64."""
    alone = copy.deepcopy(model).double()
    alone.zero_grad()
    for rank in range(2):
        (alone(inputs(rank, step).double()).sum() / 2).backward()
    return gradients(alone)


def by_hand(model: nn.Module, **arguments: object) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, **arguments)
    assert not ddp.require_manual_backward_finalization and not ddp.should_finalize_after_backward
    ddp.require_manual_backward_finalization = True
    assert ddp.require_manual_backward_finalization and ddp.should_finalize_after_backward
    return ddp


@kept_ranks(2, group="gloo")
@paths
@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_gradients_are_means_once_they_are_finalized(rank, reduce_through, gradient_as_bucket_view):
    model = two_layers()
    arguments = {"reduce_through": reduce_through, "gradient_as_bucket_view": gradient_as_bucket_view}
    ddp = by_hand(model, **arguments)
    for step in range(3):
        own = copy.deepcopy(model)
        own.zero_grad()
        own(inputs(rank, step)).sum().backward()
        ddp.zero_grad()
        ddp(inputs(rank, step)).sum().backward()
        if not gradient_as_bucket_view:  # bucket views are averaged in place, which has begun
            for before, alone in zip(gradients(model), gradients(own), strict=True):
                assert_close(before, alone)
        ddp.finalize_backward()
        for mean, expected in zip(gradients(model), means(model, step), strict=True):
            assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
    assert ddp.num_good_passes == 3


@kept_ranks(2, group="gloo")
def test_the_mode_may_change_between_backwards_and_is_kept_by_copies(rank):
    ddp = by_hand(two_layers())
    ddp(inputs(rank, 0)).sum().backward()
    ddp.finalize_backward()
    assert copy.deepcopy(ddp).require_manual_backward_finalization
    ddp.require_manual_backward_finalization = False
    ddp.zero_grad()
    ddp(inputs(rank, 1)).sum().backward()
    for mean, expected in zip(gradients(ddp.module), means(ddp.module, 1), strict=True):
        assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
    twin = copy.deepcopy(ddp)
    twin.require_manual_backward_finalization = True
    twin.zero_grad()
    twin(inputs(rank, 2)).sum().backward()  # the first backward connects the copy
    with pytest.raises(ConfigError, match="has not been finalized"):
        twin(inputs(rank, 2))
    twin.finalize_backward()
    for mean, expected in zip(gradients(twin.module), means(twin.module, 2), strict=True):
        assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)


@kept_ranks(2, group="gloo")
def test_calls_out_of_order_are_refused_and_training_continues(rank):
    ddp = DistributedDataParallel(two_layers())
    with pytest.raises(ConfigError, match="each backward finalizes itself"):
        ddp.finalize_backward()
    with pytest.raises(TypeError, match=NAME):
        ddp.require_manual_backward_finalization = "yes"
    ddp.require_manual_backward_finalization = True
    with pytest.raises(ConfigError, match="no backward to finalize"):
        ddp.finalize_backward()
    with ddp.no_sync():
        ddp(inputs(rank, 0)).sum().backward()
    with pytest.raises(ConfigError, match="no backward to finalize"):
        ddp.finalize_backward()
    ddp.zero_grad()
    output = ddp(inputs(rank, 0))
    within = []
    output.register_hook(lambda _: within.append(refused(ddp)))
    output.sum().backward()
    assert within == [True]
    with pytest.raises(ConfigError, match="has not been finalized"):
        ddp(inputs(rank, 1))
    with pytest.raises(ConfigError, match="while one is under way"):
        ddp.require_manual_backward_finalization = False
    with torch.no_grad():
        ddp(inputs(rank, 1))
    ddp.finalize_backward()
    with pytest.raises(ConfigError, match="no backward to finalize"):
        ddp.finalize_backward()
    ddp.zero_grad()
    ddp(inputs(rank, 1)).sum().backward()
    ddp.finalize_backward()
    for mean, expected in zip(gradients(ddp.module), means(ddp.module, 1), strict=True):
        assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)


def refused(ddp: DistributedDataParallel) -> bool:
    try:
        ddp.finalize_backward()
    except ConfigError:
        return True
    return False


@kept_ranks(2, group="gloo")
def test_finalize_backward_raises_the_errors_of_the_backward(rank):
    ddp = by_hand(two_layers(), nonfinite="raise")
    (ddp(inputs(rank, 0)).sum() * (float("inf") if rank else 1.0)).backward()
    with pytest.raises(RuntimeError, match="finite"):
        ddp.finalize_backward()
    ddp.zero_grad()
    ddp(inputs(rank, 1)).sum().backward()
    ddp.finalize_backward()
    for mean, expected in zip(gradients(ddp.module), means(ddp.module, 1), strict=True):
        assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)


@kept_ranks(2, group="gloo")
@pytest.mark.skipif(not hasattr(TorchDDP, NAME), reason="torch's DDP has this since 2.15")
def test_gradients_and_errors_match_torchs_ddp(rank):
    ours, theirs = by_hand(two_layers()), TorchDDP(two_layers())
    setattr(theirs, NAME, True)
    for step in range(3):
        for ddp in (ours, theirs):
            ddp.zero_grad()
            ddp(inputs(rank, step)).sum().backward()
            ddp.finalize_backward()
            with pytest.raises(RuntimeError):
                ddp.finalize_backward()
        for one, other in zip(gradients(ours.module), gradients(theirs.module), strict=True):
            assert_close(one, other)


def test_a_single_rank_may_finalize(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ddp = by_hand(two_layers())
    ddp(inputs(0, 0)).sum().backward()
    before = [gradient.clone() for gradient in gradients(ddp.module)]
    ddp.finalize_backward()
    for gradient, expected in zip(gradients(ddp.module), before, strict=True):
        assert_close(gradient, expected, rtol=0, atol=0)
