"""Sparse gradients: of a whole model, and of embeddings that are weighted, unused or not finite."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.errors import NonFiniteGradientError, UnusedParameterError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["memory", "group"]


class Words(nn.Module):
    """Sums two embeddings. With `dense`, it also uses the weight of the second embedding densely."""

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
@kept_ranks(2, group="gloo")
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
        if step < 2:  # in step 2, only equality between ranks is checked
            assert_close(dense_of(ours), dense_of(expected))
            assert_close(ddp.grad_norm(), torch.cat([g.flatten() for g in dense_of(expected)]).norm().item())
        mine = torch.cat([g.flatten() for g in dense_of(p.grad for p in net.parameters())])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both)
        if step < 2:
            for optimizer in optimizers:
                optimizer.step()


@kept_ranks(2, group="gloo")
def test_sparse_gradients_that_are_weighted_unused_or_nonfinite(rank: int) -> None:
    net = nn.Embedding(4, 1, sparse=True)
    net.weight.data.zero_()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, nonfinite="raise")
    with ddp.weight(3 - 2 * rank):  # 3 and 1
        (ddp(torch.tensor([rank])).sum() * (1 + 4 * rank)).backward()
    assert_close(net.weight.grad.to_dense(), torch.tensor([[0.75], [1.25], [0.0], [0.0]]))

    with ddp.join():
        for _ in range(1 + rank):  # in the second backward, rank 0 contributes zeros
            ddp.zero_grad()
            ddp(torch.tensor([3])).sum().backward()
    # Rank 0 keeps the mean of the first backward.
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


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_mean_without_rows_is_added_to(rank: int, path: str) -> None:
    """Autograd resizes the storage of a sparse gradient in place, so torch must own it."""
    net = nn.Embedding(4, 2, sparse=True)
    ddp = DistributedDataParallel(net, reduce_through=path)
    for ids in ([], [1], [1, 2]):
        ddp(torch.tensor(ids, dtype=torch.int64)).sum().backward()
    expected = torch.tensor([0.0, 2.0, 1.0, 0.0])[:, None].expand(4, 2)
    assert_close(net.weight.grad.to_dense(), expected)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_mean_without_any_weight_stays_sparse(rank: int, path: str) -> None:
    """SparseAdam refuses dense gradients, and SGD with momentum refuses a dense one after a sparse one."""
    net = nn.Embedding(4, 2, sparse=True)
    before = net.weight.detach().clone()
    ddp = DistributedDataParallel(net, reduce_through=path)
    with ddp.weight(0):
        ddp(torch.tensor([rank])).sum().backward()
    assert net.weight.grad.is_sparse and net.weight.grad._values().shape == (0, 2)
    torch.optim.SparseAdam(net.parameters()).step()
    assert torch.equal(net.weight, before)
    ddp(torch.tensor([rank])).sum().backward()  # with the default weight, accumulated onto the empty mean
    assert_close(net.weight.grad.to_dense()[:, 0], torch.tensor([0.5, 0.5, 0.0, 0.0]))
