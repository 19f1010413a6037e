"""A fault on one rank raises on every rank in the same backward, and names the rank and the parameters."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from paceline.errors import (
    CollectiveError,
    ConfigError,
    ModelMismatchError,
    NonFiniteGradientError,
    PeerLostError,
    SkippedPassError,
    UnusedParameterError,
)
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks, ranks
from tests.multiprocess.ddp_models import Branches, two_layers

PATHS = ["group", "memory"]


def forget_gradient(on_ranks: list[int], rank: int, parameter: torch.Tensor) -> None:
    if rank in on_ranks:
        parameter.grad = None


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(3, group="gloo")
def test_an_unused_parameter_raises_on_all_ranks(rank: int, path: str) -> None:
    model = Branches()
    del model.never
    ddp = DistributedDataParallel(model, reduce_through=path)
    x = torch.ones(1, 3)
    for _ in range(2):
        with pytest.raises(UnusedParameterError) as caught:
            ddp(x, "left" if rank == 1 else "both").sum().backward()
        assert caught.value.unused == {"right.weight": (1,), "right.bias": (1,)}
        assert "rank 1: right.weight, right.bias" in str(caught.value)
    model.zero_grad()
    ddp(x * (1 + rank), "both").sum().backward()
    assert_close(model.right.weight.grad, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_gradient_that_cannot_be_averaged_raises_on_all_ranks(rank: int, path: str) -> None:
    """A hook removes the gradient on one rank or on both: that backward raises and the next one succeeds."""
    x = torch.ones(1, 4)
    for view in (False, True):
        model = two_layers()
        bias = model[2].bias
        spoilt: list[int] = []
        bias.register_post_accumulate_grad_hook(
            functools.partial(forget_gradient, spoilt, rank)
        )  # before ours
        ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
        for spoilt[:] in ([1], [], [0, 1], []):
            ddp.zero_grad()
            loss = ddp(x).sum() * (1 + rank)
            if not spoilt:
                loss.backward()
                assert_close(bias.grad, torch.full((2,), 1.5))
                continue
            with pytest.raises(ConfigError) as caught:
                loss.backward()
            if rank in spoilt:
                assert "got      no gradient" in str(caught.value)
                assert "another hook" in str(caught.value)
                assert f"rank {rank} of 2" in str(caught.value)
            else:
                assert "The gradient of '2.bias' cannot be averaged on rank 1 of 2." in str(caught.value)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_converted_model_is_noticed(rank: int, path: str) -> None:
    """Converting a model moves gradients out of the gradient buffer, so the next backward raises."""
    x = torch.ones(1, 4)
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=True)
    ddp(x).sum().backward()
    for convert in (model.double, model.float):  # converting back does not restore the old place
        convert()
        inputs = x.to(model[0].weight.dtype)
        with ddp.no_sync(), pytest.raises(ConfigError, match="does not lie in the memory"):
            ddp(inputs).sum().backward()
        for keep in (True, False):
            ddp.zero_grad(set_to_none=not keep)
            with pytest.raises(ConfigError, match="does not lie in the memory"):
                ddp(inputs).sum().backward()
    ddp = DistributedDataParallel(model, reduce_through=path, gradient_as_bucket_view=True)
    for _ in range(2):
        ddp.zero_grad()
        (ddp(x).sum() * (1 + rank)).backward()
        assert_close(model[2].bias.grad, torch.full((2,), 1.5))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_rank_that_uses_no_parameter_completes_its_backward(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Branches(), reduce_through=path)
    x = torch.ones(1, 3, requires_grad=True)
    with pytest.raises(UnusedParameterError, match=r"rank 1: left.weight, left.bias, right.weight"):
        ddp(x, "none" if rank == 1 else "both").sum().backward()
    allowed = DistributedDataParallel(Branches(), reduce_through=path, find_unused_parameters=True)
    allowed(x, "none" if rank == 1 else "both").sum().backward()
    assert_close(allowed.module.left.weight.grad, torch.full((2, 3), 0.5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2, group="gloo")
def test_unused_parameters_contribute_nothing_where_allowed(rank: int, path: str, view: bool) -> None:
    model = Branches()
    ddp = DistributedDataParallel(
        model, reduce_through=path, find_unused_parameters=True, gradient_as_bucket_view=view
    )
    x = torch.ones(1, 3)
    for _ in range(2):
        ddp.zero_grad(set_to_none=True)
        ddp(x, "left" if rank == 1 else "both").sum().backward()
        assert_close(model.left.weight.grad, torch.ones(2, 3))
        assert_close(model.right.weight.grad, torch.full((2, 3), 0.5))
        assert model.never.weight.grad is None
    # Without zeroing, the gradients left from before are equal on all ranks and stay part of the mean.
    ddp(x, "left" if rank == 1 else "right").sum().backward()
    assert_close(model.left.weight.grad, torch.full((2, 3), 1.5))
    assert_close(model.right.weight.grad, torch.ones(2, 3))
    assert model.never.weight.grad is None


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_static_graph_may_leave_parameters_out(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Branches(), reduce_through=path, static_graph=True)
    ddp(torch.ones(1, 3), "left").sum().backward()
    assert ddp.module.right.weight.grad is None


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_static_graph_may_differ_between_ranks(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Branches(), reduce_through=path, static_graph=True)
    for _ in range(3):
        ddp(torch.ones(1, 3), "left" if rank else "right").sum().backward()
        ddp.zero_grad(set_to_none=False)  # parameters outside this rank's graph keep zeros


@kept_ranks(3, group="gloo")
def test_static_graph_on_some_ranks_only_is_refused(rank: int) -> None:
    static, unused = {"static_graph": True}, {"find_unused_parameters": True}
    for options, expected in [
        ([static, {}, {}], ["static_graph", "rank 0: ", "static_graph=True", "ranks 1-2: "]),
        ([unused, static, unused], ["and static_graph differ", "rank 1: ", "ranks 0, 2: "]),
        ([unused, {}, unused], ["find_unused_parameters differs", "rank 1: find_unused_parameters=False"]),
    ]:
        with pytest.raises(ModelMismatchError) as caught:
            DistributedDataParallel(Branches(), **options[rank])
        assert all(words in str(caught.value) for words in expected), str(caught.value)
    # With static_graph everywhere, ranks may differ in find_unused_parameters.
    options = {**static, **unused} if rank == 1 else static
    DistributedDataParallel(Branches(), **options)(torch.ones(1, 3), "left").sum().backward()


@kept_ranks(2, group="gloo")
def test_ranks_that_delay_other_parameters_are_refused(rank: int) -> None:
    model = two_layers()
    named = dict(model.named_parameters())
    for delayed, trigger, expected in [
        (["2.weight", "2.bias"][rank], "0.weight", "delay_all_reduce_named_params=2.bias"),
        ("2.weight", ["0.weight", "0.bias"][rank], "param_to_hook_all_reduce=0.bias"),
    ]:
        with pytest.raises(ModelMismatchError) as caught:
            DistributedDataParallel(
                model,
                delay_all_reduce_named_params=[(delayed, named[delayed])],
                param_to_hook_all_reduce=named[trigger],
            )
        assert f"rank 1: {expected}" in str(caught.value)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_static_graph_set_later_on_one_rank_is_reported_in_that_backward(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    x = torch.full((1, 4), 1.0 + rank)
    if rank == 0:
        ddp._set_static_graph()
    for _ in range(2):
        with pytest.raises(
            ModelMismatchError,
            match=r"(?s)rank 0: static_graph=True.*rank 1: static_graph=False.*_set_static_graph",
        ):
            ddp(x).sum().backward()
    if rank == 1:
        ddp._set_static_graph()
    ddp(x)
    if rank == 1:
        ddp(x)
    with pytest.raises(SkippedPassError, match=r"(?s)rank 0: 2 forwards.*rank 1: 3 forwards"):
        ddp(x).sum().backward()
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).sum().backward()
        assert_close(ddp.module[2].bias.grad, torch.ones(2))
        ddp.finish()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(3, group="gloo")
def test_a_skipped_backward_raises_in_the_backward_it_happens_in(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    x = torch.ones(1, 4)
    ddp(x).sum().backward()
    loss = ddp(x).sum()
    if rank == 2:
        loss = ddp(x).sum()  # goes on to the next batch
    with pytest.raises(SkippedPassError, match="Rank 2 of 3 skipped") as caught:
        loss.backward()
    assert caught.value.ranks == (2,)
    ddp(x).sum().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_backward_that_raised_half_way_is_reported_to_all(rank: int, path: str) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model, reduce_through=path, bucket_cap_mb=0.0001)
    x = torch.ones(1, 4)

    def fail(_: torch.Tensor) -> None:
        raise MemoryError("out of memory, say")

    if rank == 1:
        handle = model[0].weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(MemoryError):
            ddp(x).sum().backward()
        handle.remove()
    else:
        with pytest.raises(SkippedPassError, match="The backward of rank 1 of 2 ended in an exception"):
            ddp(x).sum().backward()
    model.zero_grad()
    ddp(x * (1 + rank)).sum().backward()
    assert_close(model[2].bias.grad, torch.ones(2))


def nan_on(rank: int, nan_rank: int) -> torch.Tensor:
    return torch.full((1, 4), float("nan") if rank == nan_rank else 1.0)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_nan_is_reported_with_rank_and_parameters(rank: int, path: str) -> None:
    wrap = {
        policy: DistributedDataParallel(two_layers(), reduce_through=path, nonfinite=policy)
        for policy in ("warn", "raise", "ignore")
    }
    with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2") as caught:
        wrap["raise"](nan_on(rank, 1)).sum().backward()
    assert caught.value.nonfinite == {1: ("0.weight", "0.bias", "2.weight")}
    with pytest.warns(RuntimeWarning, match="rank 1: 0.weight, 0.bias, 2.weight"):
        wrap["warn"](nan_on(rank, 1)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap["warn"](nan_on(rank, 1)).sum().backward()  # it warns only once
        wrap["ignore"](nan_on(rank, 1)).sum().backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_large_finite_values_are_not_reported(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, nonfinite="raise")
    (ddp(torch.ones(1, 4)).sum() * 3e37).backward()  # the sum of all gradients overflows, no gradient does


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_sum_of_finite_gradients_that_overflows_is_reported(rank: int, path: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    ddp = DistributedDataParallel(model, reduce_through=path, nonfinite="raise")
    for _ in range(2):
        ddp.weight(1.0)  # over a process group, gradients are scaled by the previous backward's weights
        ddp(torch.ones(1, 1)).sum().backward()
    ddp.weight(4.0)
    with pytest.raises(NonFiniteGradientError, match="The sum of the gradients over 2 ranks") as caught:
        (ddp(torch.ones(1, 1)).sum() * 2e38).backward()
    assert "1.bias" in caught.value.overflowed and caught.value.nonfinite == {}
    assert ddp.nonfinite() == {}
    silent = DistributedDataParallel(model, reduce_through=path, nonfinite="ignore")
    silent.weight(4.0)
    (silent(torch.ones(1, 1)).sum() * 2e38).backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_the_error_of_a_failed_backward_says_that_gradients_are_unusable(rank: int, path: str) -> None:
    """Buckets that were complete before the error hold means; the others hold local gradients."""
    ddp = DistributedDataParallel(Branches(), reduce_through=path, bucket_cap_mb=1e-6)
    with pytest.raises(UnusedParameterError, match="are not to be used, on any rank"):
        ddp(torch.ones(1, 3), "left" if rank else "both").sum().backward()
    with pytest.raises(SkippedPassError, match="are not to be used, on any rank"):
        if rank:
            ddp(torch.ones(1, 3), "both")
        ddp(torch.ones(1, 3), "both").sum().backward()


@ranks(3, group="gloo", dies={1: signal.SIGKILL})
def test_a_killed_rank_is_named_at_once(rank: int) -> None:
    model = two_layers()
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        model[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        ddp(torch.ones(1, 4)).sum().backward()
    assert caught.value.lost == (1,)
    assert time.monotonic() - started < 60  # well before the deadline; tests/fault measures how soon


@ranks(2, group="gloo", dies={1: signal.SIGKILL})
def test_a_killed_rank_ends_the_others_backward_over_gloo(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through="group", timeout_s=20)
    ddp(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="over torch's gloo process group"):
        ddp(torch.ones(1, 4)).sum().backward()


@ranks(2, group="gloo", dies={1: ValueError})
def test_a_rank_that_raises_is_quoted_by_the_others(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    if rank == 1:
        raise ValueError("bad batch")
    with pytest.raises(PeerLostError):
        ddp(torch.ones(1, 4)).sum().backward()


@kept_ranks(2, group="gloo")
def test_autograd_grad_does_not_count_as_a_backward(rank: int) -> None:
    """A gradient penalty calls autograd.grad() through the model before backward()."""
    ddp = DistributedDataParallel(two_layers())
    x = torch.full((1, 4), 1.0 + rank, requires_grad=True)
    for _ in range(2):
        (slope,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        (ddp(x).sum() + slope.square().sum()).backward()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_loss_may_depend_on_the_parameters_only(rank: int, path: str) -> None:
    """Users write such a loss, times 0, for a batch that they drop after its forward."""
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    for step in range(4):
        ddp.zero_grad()
        loss = ddp(torch.ones(1, 4)).sum()
        if step % 2 == rank:
            loss = sum(parameter.sum() for parameter in ddp.parameters()) * 0
        loss.backward()
        assert_close(ddp.module[2].bias.grad, torch.full((2,), 0.5))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_rank_may_leave_the_output_of_a_forward_out_of_its_loss(rank: int, path: str) -> None:
    """A batch without a target, for example: its forward counts like any other."""
    ddp = DistributedDataParallel(two_layers(), reduce_through=path)
    for _ in range(3):
        ddp.zero_grad()
        losses = [ddp(torch.ones(1, 4)).sum() for _ in range(2)]
        (losses[0] if rank else losses[0] + losses[1]).backward()
        assert_close(ddp.module[2].bias.grad, torch.full((2,), 1.5))
