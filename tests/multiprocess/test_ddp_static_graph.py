"""The promise of static_graph=True. If one rank breaks it, every rank raises in that backward."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.errors import ConfigError, GraphChangedError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["memory", "group"]
# How a training loop may clear gradients between two steps.
CLEARED = {
    "to None": lambda model: model.zero_grad(),
    "to zeros": lambda model: model.zero_grad(set_to_none=False),
    "not at all": lambda model: None,
}


class Fork(nn.Module):
    """Uses the layers that its caller names, and the layer `always`."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("left", "right", "always"):
            layer = nn.Linear(1, 1, bias=False)
            nn.init.ones_(layer.weight)
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return sum((getattr(self, name)(x) for name in names), self.always(x))


def step(ddp: nn.Module, rank: int, *names: str) -> None:
    ddp(torch.full((1,), 1.0 + rank), *names).sum().backward()


@pytest.mark.parametrize("cleared", CLEARED)
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_parameter_that_is_used_later_breaks_the_promise(rank: int, path: str, cleared: str) -> None:
    for changed_on in ([1], [0, 1]):  # on one rank, or on both
        ddp = DistributedDataParallel(Fork(), static_graph=True, reduce_through=path)
        for _ in range(2):
            step(ddp, rank)
            CLEARED[cleared](ddp)
        with pytest.raises(GraphChangedError, match="static_graph=True promised") as caught:
            step(ddp, rank, *(["left"] if rank in changed_on else []))
        assert caught.value.changed == ("left.weight",)
        named = "rank 1: left.weight" if changed_on == [1] else "ranks 0-1: left.weight"
        assert f"no gradient in the first backward, {named}" in str(caught.value)


@pytest.mark.parametrize("cleared", CLEARED)
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_parameter_that_drops_out_breaks_the_promise(
    rank: int, path: str, view: bool, cleared: str
) -> None:
    for changed_on in ([1], [0, 1]):
        ddp = DistributedDataParallel(
            Fork(), static_graph=True, reduce_through=path, gradient_as_bucket_view=view
        )
        for _ in range(2):
            step(ddp, rank, "left", "right")
            CLEARED[cleared](ddp)
        with pytest.raises(GraphChangedError, match="static_graph=True promised") as caught:
            step(ddp, rank, "left", *(["right"] if rank not in changed_on else []))
        assert caught.value.changed == ("right.weight",)
        named = "rank 1: right.weight" if changed_on == [1] else "ranks 0-1: right.weight"
        assert f"no gradient any more, {named}" in str(caught.value)
        # The error is raised once; training continues when the promise is kept again.
        ddp.zero_grad()
        step(ddp, rank, "left", "right")
        assert_close(ddp.module.right.weight.grad, torch.full((1, 1), 1.5))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_ranks_may_have_different_graphs(rank: int, path: str) -> None:
    """Ranks may leave out different parameters, whether their `.grad` is None, zeros, or an old gradient."""
    ddp = DistributedDataParallel(Fork(), static_graph=True, reduce_through=path)
    own, other = ("left", "right") if rank else ("right", "left")
    for cleared in CLEARED.values():
        ddp.zero_grad()
        for _ in range(3):
            step(ddp, rank, own)
            cleared(ddp)
    with pytest.raises(GraphChangedError) as caught:
        step(ddp, rank, own if rank else other)
    assert caught.value.changed == ("left.weight", "right.weight")
    assert "no gradient any more, rank 0: right.weight" in str(caught.value)
    assert "no gradient in the first backward, rank 0: left.weight" in str(caught.value)


@kept_ranks(2, group="gloo")
def test_the_promise_holds_for_all_micro_batches_of_a_step_together(rank: int) -> None:
    ddp = DistributedDataParallel(Fork(), static_graph=True)
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            step(ddp, rank, "left")
        step(ddp, rank, "right")
        assert_close(ddp.module.left.weight.grad, torch.full((1, 1), 1.5))
    ddp.zero_grad()
    with pytest.raises(GraphChangedError) as caught:
        step(ddp, rank, "right")  # without the micro-batch that uses `left`
    assert caught.value.changed == ("left.weight",)


@kept_ranks(2, group="gloo")
def test_a_rank_without_data_keeps_the_promise_of_its_first_backward(rank: int) -> None:
    ddp = DistributedDataParallel(Fork(), static_graph=True)
    for epoch in range(2):
        for _ in range(2 + rank):
            ddp.zero_grad()
            step(ddp, rank, "left")
        if epoch and rank:  # rank 0 is in finish() and raises, too
            with pytest.raises(GraphChangedError, match="rank 1: left"):
                step(ddp, rank)
        elif epoch:
            with pytest.raises(GraphChangedError, match="rank 1: left"):
                ddp.finish()
        else:
            ddp.finish()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_promise_after_training_is_refused(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Fork(), reduce_through=path, find_unused_parameters=True)
    ddp.eval()
    with torch.no_grad():
        step_free = ddp(torch.ones(1))
    assert not step_free.requires_grad
    refused: dict[str, Any] = {"match": rf"(?s)before training loop starts.*rank {rank} of 2"}
    output = ddp.train()(torch.ones(1), "left").sum()
    with pytest.raises(ConfigError, **refused):
        ddp._set_static_graph()
    output.backward()
    for method in (ddp._set_static_graph, ddp.reducer._set_static_graph):
        with pytest.raises(ConfigError, **refused):
            method()
    # The refused calls have changed nothing.
    assert not ddp.static_graph
    ddp.zero_grad()
    step(ddp, rank, "right")
    assert_close(ddp.module.right.weight.grad, torch.full((1, 1), 1.5))


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@kept_ranks(2, group="gloo")
def test_a_gradient_that_arrives_twice_is_named(rank: int) -> None:
    """On one rank or on both: every rank raises in that backward, and the next one succeeds."""
    for options in (
        {"reduce_through": "memory"},
        {"reduce_through": "group"},
        {"gradient_as_bucket_view": True},
    ):
        ddp = DistributedDataParallel(Repeats(), **options)
        x = torch.ones(1, 2, requires_grad=True)
        for times, where in ((1 + rank, "rank 1 of 2"), (2, "all 2 ranks")):
            with pytest.raises(GraphChangedError, match=rf"'layer.weight' came twice .* {where}") as caught:
                ddp(x, times).sum().backward()
            assert caught.value.changed == ("layer.weight",)
            ddp.zero_grad()
            (ddp(x, 1).sum() * (1 + rank)).backward()
            assert_close(ddp.module.layer.weight.grad, torch.full((2, 2), 1.5))


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_static_graph_counts_gradients_that_arrive_several_times(rank: int, path: str) -> None:
    """A layer in several reentrant checkpoints works with static_graph, as in torch."""
    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 25}):
        net = nn.Sequential(nn.Linear(2, 2), Repeats(), nn.Linear(2, 1))
        net[1].forward = functools.partial(net[1].forward, times=2)
        alone = copy.deepcopy(net)
        ddp = DistributedDataParallel(
            net, **{"static_graph": True, "reduce_through": path, "bucket_cap_mb": 0.00001} | options
        )
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        for _ in range(3):
            for module in (ddp, alone):
                module.zero_grad()
            alone(x).mean().backward()
            ddp(x[rank : rank + 1]).mean().backward()
            for ours, expected in zip(net.parameters(), alone.parameters(), strict=True):
                assert_close(ours.grad, expected.grad)
        net[1].forward = functools.partial(Repeats.forward, net[1], times=2 + rank)
        with pytest.raises(GraphChangedError, match=r"'1.layer.weight' came twice .* rank 1 of 2"):
            ddp(x).sum().backward()
