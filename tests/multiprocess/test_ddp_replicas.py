"""Replicas that differ although their gradients are equal: the check names the rank and the values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError, ReplicasDifferError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

PATHS = ["memory", "group"]
ODD = 2  # of 3 ranks


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def backward(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()
    generator = torch.Generator().manual_seed(ddp._peers.rank)
    ddp(torch.randn(5, 4, generator=generator)).square().sum().backward()


def update(ddp: DistributedDataParallel, rate: float = 0.1) -> None:
    """A step of gradient descent without an optimizer of torch, whose first one takes seconds to create."""
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.sub_(parameter.grad, alpha=rate)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(3, group="gloo")
def test_a_check_on_demand_compares_the_optimizer_state_too(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(network(), reduce_through=path)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    backward(ddp)
    optimizer.step()
    ddp.check_replicas(optimizer)
    if rank == ODD:
        optimizer.state[ddp.module[0].bias]["exp_avg"][2] = 7
    ddp.check_replicas()
    with pytest.raises(
        ReplicasDifferError, match=r"Rank 2 .*1 of \d+ values differ, optimizer '0\.bias\.exp_avg' first"
    ):
        ddp.check_replicas(optimizer)
    if rank == ODD:
        del optimizer.state[ddp.module[0].bias]
        optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ReplicasDifferError) as caught:
        ddp.check_replicas(optimizer)
    names = ("0.bias.step", "0.bias.exp_avg", "0.bias.exp_avg_sq", "group 0.lr")
    assert caught.value.differing == dict.fromkeys(names, (ODD,))


@kept_ranks(2, group="gloo")
def test_buffers_are_compared_as_their_policy_says(rank: int) -> None:
    policies = (
        ({}, True),
        ({"buffers": {"*.running_*": "average"}}, True),
        ({"broadcast_buffers": False}, False),
        ({"buffers": {"1.*": "local"}}, False),
    )
    for options, is_compared in policies:
        ddp = DistributedDataParallel(network(), check_replicas_every=1, **options)
        backward(ddp)
        if rank == 1:
            ddp.module[1].running_mean.add_(1)
        if is_compared:
            with pytest.raises(ReplicasDifferError, match=r"buffer '1\.running_mean'") as caught:
                ddp.check_replicas()
            assert "local" in caught.value.likely
        else:
            ddp.check_replicas()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_equal_replicas_pass_every_check(rank: int, path: str) -> None:
    """Covers layouts, dtypes, empty and shared tensors, ranks that run out of data, and accumulation."""
    net = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten())
    net.append(nn.Linear(12, 4)).append(nn.Linear(4, 4, bias=False)).append(nn.Linear(4, 4, bias=False))
    net[4].weight = net[3].weight
    net.register_buffer("none", torch.empty(0))
    net.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
    ddp = DistributedDataParallel(net, reduce_through=path, check_replicas_every=1)
    for batches in (3 + rank, 4 - rank):
        for _ in ddp.iterate(range(batches)):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(2, 2, 3, 3)).sum().backward()
            ddp(torch.randn(2, 2, 3, 3)).sum().backward()
            update(ddp, 1e-3)
        ddp.check_replicas()


@kept_ranks(2, group="gloo")
def test_check_replicas_every_is_validated_and_equal_on_all_ranks(rank: int) -> None:
    for wrong in (-1, 2.5, "often"):
        with pytest.raises(ConfigError, match="check_replicas_every"):
            DistributedDataParallel(network(), check_replicas_every=wrong)
    with pytest.raises(RuntimeError, match="check_replicas_every differs"):
        DistributedDataParallel(network(), check_replicas_every=rank)


@kept_ranks(1, group=None)
def test_a_single_rank_compares_nothing(rank: int) -> None:
    ddp = DistributedDataParallel(network(), check_replicas_every=1)
    ddp(torch.randn(5, 4)).sum().backward()
    ddp.check_replicas()


def train(ddp: DistributedDataParallel, steps: int = 2) -> None:
    for _ in range(steps):
        backward(ddp)
        update(ddp)
    backward(ddp)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(3, group="gloo")
def test_a_skipped_or_additional_step_is_reported_in_the_next_backward(rank: int, path: str) -> None:
    for steps, expected in ((0, "ranks 0-1: 12; rank 2: 0"), (2, "ranks 0-1: 12; rank 2: 24")):
        ddp = DistributedDataParallel(network(), reduce_through=path)
        train(ddp)
        for _ in range(steps if rank == ODD else 1):
            with torch.no_grad():
                for parameter in ddp.parameters():
                    for _ in range(4):  # like an optimizer that writes several times per step
                        parameter.sub_(parameter.grad, alpha=0.1)
        with pytest.raises(ReplicasDifferError, match=r"Rank 2 of 3 .*parameter '0\.weight'") as caught:
            backward(ddp)
        assert expected in caught.value.seen


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(3, group="gloo")
def test_drift_with_equal_numbers_of_writes_is_a_warning(rank: int, path: str) -> None:
    """Processors of different kinds may round differently; check_replicas_every makes it an error."""
    ddp = DistributedDataParallel(network(), reduce_through=path)
    train(ddp)
    update(ddp, 0.1 if rank != ODD else 0.1001)
    with pytest.warns(RuntimeWarning, match=r"Rank 2 of 3 .*parameter '0\.weight'"):
        backward(ddp)
    train(ddp)  # it warns only once
    silent = DistributedDataParallel(network(), reduce_through=path, check_replicas_every=0)
    strict = DistributedDataParallel(network(), reduce_through=path, check_replicas_every=1000)
    for ddp in (silent, strict):
        train(ddp)
        update(ddp, 0.1 if rank != ODD else 0.1001)
    backward(silent)
    with pytest.raises(ReplicasDifferError, match=r"Rank 2 of 3 .*parameter '0\.weight'"):
        backward(strict)


@kept_ranks(2, group="gloo")
def test_extra_writes_are_accepted_if_the_replicas_stay_equal(rank: int) -> None:
    ddp = DistributedDataParallel(network())
    train(ddp)
    if rank == 0:  # it evaluates with other weights, then restores its own
        own = {name: value.clone() for name, value in ddp.module.state_dict().items()}
        ddp.module.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
        ddp.module.load_state_dict(own)
    update(ddp)
    train(ddp)
    if rank == 0:  # it acts as a parameter server
        update(ddp)
    for parameter in ddp.parameters():
        dist.broadcast(parameter.detach(), src=0)
    train(ddp)


@kept_ranks(2, group="gloo")
def test_replicas_that_step_alone_for_a_while_cause_only_a_warning(rank: int) -> None:
    ddp = DistributedDataParallel(network())
    train(ddp)
    for _ in range(2 + rank):
        update(ddp)
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.randn(5, 4)).square().sum().backward()
    with pytest.warns(RuntimeWarning, match="the 2 replicas|The 2 replicas"):
        backward(ddp)


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_a_batch_that_one_rank_drops_is_reported_in_that_backward(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(network(), reduce_through=path)
    backwards = 0
    with pytest.warns(RuntimeWarning, match=r"rank 0: 0; rank 1: 1\."):
        for number in ddp.iterate(range(6)):
            if rank == 1 and number == 2:
                continue
            backward(ddp)
            update(ddp)
            backwards += 1
    assert backwards == (6, 5)[rank]
