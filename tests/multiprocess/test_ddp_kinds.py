"""Gradients of other kinds: sparse, complex, of gradients. Against one process with the whole batch."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from paceline.errors import GraphChangedError, NonFiniteGradientError, UnusedParameterError
from paceline.torch import DistributedDataParallel
from tests.harness import ranks

PATHS = ["memory", "group"]


class Words(nn.Module):
    """Sums embeddings; the weight of the second embedding is used densely too, where `dense` says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(10, 3, sparse=True)
        self.tied = nn.Embedding(6, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor, dense: bool = False) -> torch.Tensor:
        hidden = self.words(ids) + self.tied(ids % 6)
        if dense:
            hidden = hidden + hidden @ self.tied.weight.t() @ self.tied.weight
        return self.head(hidden).mean()


def dense_of(gradients: Any) -> list[torch.Tensor]:
    return [g.to_dense() if g.is_sparse else g for g in gradients]


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_sparse_gradients(rank: int, path: str) -> None:
    net = Words()
    alone = copy.deepcopy(net)
    ddp = DistributedDataParallel(net, reduce_through=path, bucket_cap_mb=0.00002)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (net, alone)]
    ids = torch.tensor([[1, 2, 2, 7], [2, 3, 9, 9]])
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(ids, dense=step == 2).backward()
        with ddp.no_sync():
            (ddp(ids[rank, :2], dense=step == 2) / 2).backward()
        (ddp(ids[rank, 2:], dense=step == 2) / 2).backward()
        assert net.words.weight.grad.is_sparse and net.tied.weight.grad.is_sparse == (step < 2)
        ours, expected = [[p.grad for p in module.parameters()] for module in (net, alone)]
        if step < 2:  # the dense term is no mean over words
            assert_close(dense_of(ours), dense_of(expected))
            assert_close(ddp.grad_norm(), torch.cat([g.flatten() for g in dense_of(expected)]).norm().item())
        mine = torch.cat([g.flatten() for g in dense_of(p.grad for p in net.parameters())])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both)
        if step < 2:
            for optimizer in optimizers:
                optimizer.step()


@ranks(2, group="gloo")
def test_sparse_gradients_of_weighted_unused_and_nonfinite(rank: int) -> None:
    net = nn.Embedding(4, 1, sparse=True)
    net.weight.data.zero_()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, nonfinite="raise")
    with ddp.weight(3 - 2 * rank):  # 3 and 1
        (ddp(torch.tensor([rank])).sum() * (1 + 4 * rank)).backward()
    assert_close(net.weight.grad.to_dense(), torch.tensor([[0.75], [1.25], [0.0], [0.0]]))

    with ddp.join():
        for _ in range(1 + rank):  # in the second pass rank 0 counts as zeros
            ddp.zero_grad()
            ddp(torch.tensor([3])).sum().backward()
    # What rank 0 has is its own again: the mean of the first pass.
    assert_close(net.weight.grad.to_dense()[3], torch.tensor([0.5 if rank else 1.0]))

    net = nn.ModuleList([nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1, bias=False)])

    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, use: bool, factor: float = 1.0) -> torch.Tensor:
            out = self.parts[1](torch.ones(1)).sum()
            return out + self.parts[0](torch.tensor([2])).sum() * factor if use else out

    ddp = DistributedDataParallel(Maybe(), find_unused_parameters=True, nonfinite="raise")
    ddp(use=False).backward()
    assert net[0].weight.grad is None  # unused on all ranks
    ddp(use=rank == 1).backward()
    assert_close(net[0].weight.grad.to_dense()[2], torch.tensor([0.5]))
    with pytest.raises(NonFiniteGradientError, match=r"rank 1[\s\S]*parts.0.weight"):
        ddp(use=True, factor=float("nan") if rank else 1.0).backward()
    assert ddp.nonfinite() == {1: ("parts.0.weight",)}
    strict = DistributedDataParallel(Maybe())
    with pytest.raises(UnusedParameterError, match=r"parts.0.weight"):
        strict(use=rank == 1).backward()


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.bias = nn.Parameter(torch.randn(3))  # three floats in front of complex numbers
        self.mix = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x + self.bias).to(torch.complex64) @ self.mix
        # The gradient of a conjugate is a conjugate that is not worked out in memory.
        return (y.abs().square().sum(1) + (self.turn.conj() * x.sum()).real.square().sum()).mean()


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_complex_parameters(rank: int, path: str) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(8))
    for view in (False, True):
        for hook in (None, default_hooks.allreduce_hook):
            net = Waves()
            alone = copy.deepcopy(net)
            ddp = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            for _ in range(2):
                ddp.zero_grad()
                alone.zero_grad()
                ddp(x[rank : rank + 1]).backward()
                ((alone(x[:1]) + alone(x[1:])) / 2).backward()
                for ours, expected in zip(net.parameters(), alone.parameters(), strict=True):
                    assert_close(ours.grad, expected.grad)
                square = sum(p.grad.abs().double().square().sum() for p in alone.parameters())
                assert_close(ddp.grad_norm(), float(square.sqrt()))


class Alternating(nn.Module):
    """Layers of two dtypes, in turn: buckets are complete in another order than they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        layers = [nn.Linear(4, 4, dtype=dtype) for dtype in (torch.float32, torch.float64) * 2]
        self.layers = nn.ModuleList([nn.Linear(4, 4), *layers, nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.square().mean()


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_dtypes_in_turn(rank: int, path: str) -> None:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10))
    for cap_mb in (25, 0.0001):
        net = Alternating()
        alone = copy.deepcopy(net)
        ddp = DistributedDataParallel(net, reduce_through=path, bucket_cap_mb=cap_mb)
        for _ in range(2):
            ddp.zero_grad()
            alone.zero_grad()
            ddp(x[rank : rank + 1]).backward()
            ((alone(x[:1]) + alone(x[1:])) / 2).backward()
            for ours, expected in zip(net.parameters(), alone.parameters(), strict=True):
                assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_a_gradient_penalty_trains_as_one_process_does(rank: int, path: str) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x).pow(2).mean(1)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out + (slope.norm(dim=1) - 1).square()).mean()

    for view in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        alone = copy.deepcopy(net)
        ddp = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, alone)]
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(ddp, x[2 * rank : 2 * rank + 2]).backward()
            loss_of(alone, x).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_close(list(net.parameters()), list(alone.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@ranks(2, group="gloo")
def test_a_backward_that_makes_a_graph_averages_too(rank: int) -> None:
    for path in PATHS:
        for view in (False, True):
            net = nn.Linear(3, 1, bias=False)
            ddp = DistributedDataParallel(net, reduce_through=path, gradient_as_bucket_view=view)
            for _ in range(2):
                ddp.zero_grad()
                ddp(torch.full((1, 3), 1.0 + 2 * rank)).sum().backward(create_graph=True)
                assert_close(net.weight.grad.detach(), torch.full((1, 3), 2.0))


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(1, 1, bias=False)
        self.right = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return (self.left if left else self.right)(x)


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_a_graph_that_changes_against_the_promise(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(Fork(), static_graph=True, reduce_through=path)
    for _ in range(2):
        ddp(torch.ones(1), True).sum().backward()
        ddp.zero_grad()
    with pytest.raises(GraphChangedError, match="static_graph=True promised") as caught:
        ddp(torch.ones(1), rank == 0).sum().backward()  # rank 1 leaves its way; rank 0 is told as well
    assert caught.value.changed == ("left.weight", "right.weight")
    assert "left.weight" in str(caught.value) and "rank 1" in str(caught.value)


class Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@ranks(2, group="gloo")
def test_a_gradient_that_comes_twice_is_named(rank: int) -> None:
    """On one rank, or on both: every rank raises in that pass, and the next one is good."""
    for options in (
        {"reduce_through": "memory"},
        {"reduce_through": "group"},
        {"gradient_as_bucket_view": True},
    ):
        ddp = DistributedDataParallel(Repeats(), **options)
        x = torch.ones(1, 2, requires_grad=True)
        for times, who in ((1 + rank, "rank 1 of 2"), (2, "all 2 ranks")):
            with pytest.raises(GraphChangedError, match=rf"'layer.weight' came twice .* {who}") as caught:
                ddp(x, times).sum().backward()
            assert caught.value.changed == ("layer.weight",)
            ddp.zero_grad()
            (ddp(x, 1).sum() * (1 + rank)).backward()
            assert_close(ddp.module.layer.weight.grad, torch.full((2, 2), 1.5))


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_a_static_graph_learns_what_comes_several_times(rank: int, path: str) -> None:
    """As torch's: a layer in several reentrant checkpoints."""
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
