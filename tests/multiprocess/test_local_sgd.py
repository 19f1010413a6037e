"""Local SGD: replica groups, of hosts or ranks, train independently and sync every few steps.

The reference is the algorithm in one process, in float64, with formulas of its own. Each rank sets which host
it is on: `_host_hint` decides which ranks can share memory.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from paceline.errors import (
    ConfigError,
    MismatchError,
    ModelMismatchError,
    NonFiniteGradientError,
    PeerLostError,
    ReplicasDifferError,
)
from paceline.reducer.local_sgd.outer_tensors import OuterTensors
from paceline.torch import DistributedDataParallel, LocalSGD
from paceline.torch.communicator.hosts import GlooTransport
from tests.harness import kept_ranks, ranks
from tests.local_sgd_reference import Outer, sync, values_of
from tests.several_hosts import be_on_host, noting

WIDTH = 6
LR = 0.2


def place(rank: int, num_hosts: int) -> None:
    """Place this rank on one of several hosts, in blocks."""
    number = rank * num_hosts // int(os.environ["WORLD_SIZE"])
    be_on_host(number)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def rows(step: int, world_size: int) -> torch.Tensor:
    return torch.randn(4 * world_size, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def train(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], rank: int, world_size: int
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = ddp(rows(step, world_size)[rank::world_size].to(next(ddp.parameters()).dtype))
        loss.square().mean().backward()
        optimizer.step()


class Simulation:
    """Local SGD in one process, in float64: plain SGD trains a replica for each replica group.

    Args:
        groups: The ranks of each replica group.
        outer: lr, momentum, and whether it is Nesterov's.
    """

    def __init__(self, groups: Sequence[Sequence[int]], outer: Outer) -> None:
        self.groups, self.outer = groups, outer
        self.world_size = sum(map(len, groups))
        self.replicas = [network(torch.float64) for _ in groups]
        self.begun = values_of(self.replicas[0])
        self.velocity = [np.zeros_like(value) for value in self.begun]

    def step(self, number: int, active: Sequence[int] | None = None) -> None:
        """Make one step of each replica group in `active`, or of all."""
        for group in range(len(self.groups)) if active is None else active:
            replica = self.replicas[group]
            x = rows(number, self.world_size).double()
            losses = [replica(x[rank :: self.world_size]).square().mean() for rank in self.groups[group]]
            gradients = torch.autograd.grad(sum(losses) / len(losses), list(replica.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(replica.parameters(), gradients):
                    parameter -= LR * gradient

    def sync(self, weights: Sequence[float] | None = None) -> None:
        weights = weights or [len(ranks) for ranks in self.groups]
        sync(self.replicas, self.begun, self.velocity, weights, self.outer)


def hosts_of(world_size: int, num_hosts: int) -> list[list[int]]:
    return [
        [rank for rank in range(world_size) if rank * num_hosts // world_size == host]
        for host in range(num_hosts)
    ]


def assert_same_everywhere(net: nn.Module) -> None:
    """Compare the bits of the parameters on all ranks."""
    own = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    held = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(held, own)
    for each in held:
        assert_array_equal(each.view(torch.int32).numpy(), own.view(torch.int32).numpy())


@pytest.mark.parametrize(
    "world_size, num_hosts, between, outer",
    [
        (2, 1, "ranks", (0.7, 0.9, True)),
        (2, 1, "ranks", (1.0, 0.0, True)),
        (2, 2, "hosts", (0.7, 0.5, False)),
        (4, 2, "hosts", (0.7, 0.9, True)),
        (3, 2, "hosts", (1.0, 0.0, False)),
        (2, 1, "hosts", (0.7, 0.9, True)),
    ],
)
@kept_ranks("world_size", group="gloo")
def test_parameters_are_those_of_the_algorithm(rank, world_size, num_hosts, between, outer):
    place(rank, num_hosts)
    lr, momentum, nesterov = outer
    options = LocalSGD(3, outer_lr=lr, outer_momentum=momentum, nesterov=nesterov, between=between)
    ddp = DistributedDataParallel(network(), local_sgd=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    groups = [[each] for each in range(world_size)] if between == "ranks" else hosts_of(world_size, num_hosts)
    reference = Simulation(groups, outer)
    mine = next(number for number, ranks in enumerate(groups) if rank in ranks)
    for step in range(8):
        if step in (3, 6):
            reference.sync()
        train(ddp, optimizer, [step], rank, world_size)
        reference.step(step)
        for value, expected in zip(values_of(ddp), values_of(reference.replicas[mine]), strict=True):
            assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    ddp.sync_parameters()
    reference.sync()
    for value, expected in zip(values_of(ddp), reference.begun, strict=True):
        assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    assert_same_everywhere(ddp)
    assert ddp.bits == ("world" if between == "ranks" else "layout")


@pytest.mark.parametrize("num_hosts, between", [(1, "ranks"), (2, "hosts")])
@kept_ranks(2, group="gloo")
def test_warm_up_averages_gradients_over_all_ranks(rank, num_hosts, between):
    place(rank, num_hosts)
    ddp = DistributedDataParallel(
        network(), local_sgd=LocalSGD(2, outer_momentum=0.5, warmup_steps=3, between=between)
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    whole, reference = Simulation([[0, 1]], (1.0, 0.0, True)), Simulation([[0], [1]], (0.7, 0.5, True))
    for step in range(3):
        train(ddp, optimizer, [step], rank, 2)
        whole.step(step)
        for value, expected in zip(values_of(ddp), values_of(whole.replicas[0]), strict=True):
            assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    assert_same_everywhere(ddp)
    reference.begun = values_of(whole.replicas[0])
    for replica in reference.replicas:
        replica.load_state_dict(whole.replicas[0].state_dict())
    for step in range(3, 8):
        if step in (5, 7):
            reference.sync()
        train(ddp, optimizer, [step], rank, 2)
        reference.step(step)
    for value, expected in zip(values_of(ddp), values_of(reference.replicas[rank]), strict=True):
        assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    assert ddp.num_good_passes == 8


@kept_ranks(2, group="gloo")
def test_only_synchronised_backwards_count_and_others_accumulate(rank):
    ddp = DistributedDataParallel(
        network(), local_sgd=LocalSGD(2, outer_lr=1, outer_momentum=0, between="ranks")
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR / 2)
    reference = Simulation([[0], [1]], (1.0, 0.0, True))
    for step in range(4):
        if step == 2:
            reference.sync()
        optimizer.zero_grad()
        x = rows(step, 2)[rank::2]
        with ddp.no_sync():
            ddp(x).square().mean().backward()
        with torch.no_grad():
            ddp.eval()(x)  # an evaluation in between
        ddp.train()
        ddp(x).square().mean().backward()
        optimizer.step()
        reference.step(step)
        for value, expected in zip(values_of(ddp), values_of(reference.replicas[rank]), strict=True):
            assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@kept_ranks(2, group="gloo")
def test_a_model_trained_in_evaluation_mode_syncs_and_a_lone_forward_does_not(rank):
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2, between="ranks"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(2), rank, 2)
    if rank == 0:
        ddp.eval()(rows(0, 2))  # with gradients; if it synced, it would wait for rank 1
    ddp.eval()
    train(ddp, optimizer, range(2, 3), rank, 2)
    assert ddp._outer_sync.number == 0  # the previous backward had its forward in training mode
    train(ddp, optimizer, range(3, 6), rank, 2)
    assert ddp._outer_sync.number == 2
    ddp.sync_parameters()
    assert_same_everywhere(ddp)


@kept_ranks(2, group="gloo")
def test_hosts_are_weighted_by_the_weights_of_their_steps(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2, outer_lr=0.5, outer_momentum=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    reference = Simulation([[0], [1]], (0.5, 0.0, True))
    tokens = [(3.0, 1.0), (5.0, 0.5)]
    for step, weights in enumerate(tokens):
        optimizer.zero_grad()
        with ddp.weight(weights[rank]):
            ddp(rows(step, 2)[rank::2]).square().mean().backward()
        optimizer.step()
        reference.step(step)
    ddp.sync_parameters()
    reference.sync([8.0, 1.5])
    for value, expected in zip(values_of(ddp), reference.begun, strict=True):
        assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@kept_ranks(2, group="gloo")
def test_a_sync_after_steps_without_weight_averages_the_replicas(rank):
    """The weights are 0, so gradients are too, but momentum moves the parameters of each host differently."""
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2, outer_lr=1, outer_momentum=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        ddp(rows(step, 2)[rank::2]).square().mean().backward()
        optimizer.step()
    ddp.sync_parameters()
    for step in range(2, 4):
        optimizer.zero_grad()
        with ddp.weight(0.0):
            ddp(rows(step, 2)[rank::2]).square().mean().backward()
        optimizer.step()
    own = values_of(ddp)
    held = [None, None]
    torch.distributed.all_gather_object(held, own)
    ddp.sync_parameters()
    assert_same_everywhere(ddp)
    for value, first, second in zip(values_of(ddp), *held, strict=True):
        assert_allclose(value, (first + second) / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts", [(3, 6), (4, 4), (5, 0)])
@kept_ranks(2, group="gloo")
def test_hosts_with_fewer_batches_take_part_in_later_syncs(rank, counts):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2, outer_momentum=0.5))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    reference = Simulation([[0], [1]], (0.7, 0.5, True))
    since = [0, 0]
    for step in range(max(counts)):
        active = [host for host in (0, 1) if step < counts[host]]
        reference.step(step, active)
        for host in active:
            since[host] += 1
        if max(since) == 2 or step + 1 == max(counts):
            reference.sync([float(each) for each in since])
            since = [0, 0]
    for _ in ddp.iterate(range(counts[rank])):
        train(ddp, optimizer, [ddp.num_good_passes], rank, 2)
    for value, expected in zip(values_of(ddp), reference.begun, strict=True):
        assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    assert_same_everywhere(ddp)


@kept_ranks(4, group="gloo")
def test_ranks_of_one_host_may_run_out_of_data_between_syncs(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for _ in ddp.iterate(range([1, 5, 4, 3][rank])):  # without after_pass: a rank without data makes no step
        train(ddp, optimizer, [ddp.num_good_passes], rank, 4)
    assert_same_everywhere(ddp)
    assert ddp._outer_sync.number >= 3


@kept_ranks(2, group="gloo")
def test_a_change_that_is_not_finite_is_reported_to_all_and_changes_nothing(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(2), rank, 2)
    if rank == 1:
        with torch.no_grad():
            ddp.module[2].weight[0, 1] = float("nan")
    before = values_of(ddp)
    with pytest.raises(
        NonFiniteGradientError, match=r"(?s)on rank 1 of 2.*rank 1 \(host 1\): 2.weight"
    ) as caught:
        train(ddp, optimizer, [2], rank, 2)
    assert caught.value.nonfinite == {1: ("2.weight",)}
    for value, expected in zip(values_of(ddp), before, strict=True):
        assert_array_equal(value, expected)
    state = ddp.local_sgd_state_dict()
    assert all(torch.isfinite(value).all() for value in state["parameters"].values())
    with torch.no_grad():  # the reported value can be mended, and training goes on
        ddp.module[2].weight[0, 1] = 0.0
    train(ddp, optimizer, range(2, 5), rank, 2)
    assert ddp._outer_sync.number == 2


@kept_ranks(2, group="gloo")
def test_replica_groups_that_begin_with_other_parameters_are_reported(rank):
    place(rank, 2)
    net = network()
    with torch.no_grad():
        net[0].bias[1] = rank
    ddp = DistributedDataParallel(net, init_sync=False, local_sgd=LocalSGD(1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, [0], rank, 2)
    with pytest.raises(ReplicasDifferError, match=r"(?s)'0.bias'.*first sync of local SGD"):
        train(ddp, optimizer, [1], rank, 2)


@kept_ranks(2, group="gloo")
def test_an_extra_sync_on_one_rank_is_reported_to_all(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, [0], rank, 2)
    ddp.sync_parameters()
    if rank == 0:
        ddp._outer_sync.number += 1  # as after a sync without rank 1
    with pytest.raises(MismatchError, match=r"(?s)rank 0 \(host 0\): sync 3\n.*rank 1 \(host 1\): sync 2"):
        ddp.sync_parameters()


@kept_ranks(2, group="gloo")
def test_ranks_that_sync_at_different_places_are_reported(rank):
    """Host 1 has skipped a step; from here on each of its syncs would pair with an earlier one of host 0."""
    place(rank, 2)
    ddp = DistributedDataParallel(network(), timeout_s=10, local_sgd=LocalSGD(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(2 - rank), rank, 2)
    before = values_of(ddp)
    places = r"rank 0 \(host 0\): in a forward, after 2 steps\n.*rank 1 \(host 1\): in sync_parameters\(\)"
    with pytest.raises(MismatchError, match=f"(?s){places}"):
        if rank == 0:
            train(ddp, optimizer, [2], rank, 2)
        else:
            ddp.sync_parameters()
    for value, expected in zip(values_of(ddp), before, strict=True):
        assert_array_equal(value, expected)
    ddp.sync_parameters()
    assert_same_everywhere(ddp)


@kept_ranks(2, group="gloo")
def test_an_error_caught_by_one_host_does_not_disturb_finish(rank):
    place(rank, 2)
    options = LocalSGD(4, outer_lr=1, outer_momentum=0)
    ddp = DistributedDataParallel(network(), timeout_s=10, nonfinite="raise", local_sgd=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for step in range(9):
        optimizer.zero_grad()
        x = rows(step, 2)[rank::2] * (float("nan") if (rank, step) == (1, 2) else 1)
        with contextlib.suppress(NonFiniteGradientError):
            ddp(x).square().mean().backward()
            optimizer.step()
    ddp.finish(optimizer.step)
    assert_same_everywhere(ddp)


@kept_ranks(2, group="gloo")
def test_frozen_parameters_do_not_move(rank):
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(1, between="ranks"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(3), rank, 2)
    ddp.sync_parameters()
    ddp.module[0].weight.requires_grad_(False)
    frozen, other = ddp.module[0].weight.clone(), ddp.module[2].weight.clone()
    train(ddp, optimizer, range(3, 5), rank, 2)
    ddp.sync_parameters()
    assert_array_equal(ddp.module[0].weight.numpy(), frozen.numpy())  # momentum would have moved it
    assert not torch.equal(ddp.module[2].weight, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [4, 6])  # frozen when a sync is due, or between two syncs
@kept_ranks(2, group="gloo")
def test_parameters_that_were_frozen_after_training_are_averaged(rank, steps, dtype):
    """Replica groups left them at different values, which nothing else would make equal again."""
    place(rank, 2)
    ddp = DistributedDataParallel(network(dtype), local_sgd=LocalSGD(4, outer_lr=1, outer_momentum=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(steps), rank, 2)
    weight = ddp.module[0].weight
    held = [torch.empty_like(weight) for _ in range(2)]
    torch.distributed.all_gather(held, weight.detach())
    assert not torch.equal(*held)
    weight.requires_grad_(False)
    train(ddp, optimizer, range(steps, steps + 3), rank, 2)
    ddp.sync_parameters()
    expected = (held[0].double() + held[1].double()) / 2
    rtol = 1e-6 if dtype is torch.float32 else 2**-7
    assert_allclose(weight.detach().double().numpy(), expected.numpy(), rtol=rtol)
    assert_same_everywhere(ddp.float())


@kept_ranks(2, group="gloo")
def test_parameters_that_train_in_turns_are_averaged(rank):
    """As in a GAN, if the same half is frozen at every sync."""
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2, outer_lr=1, outer_momentum=0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for step in range(6):
        ddp.module[0].requires_grad_(step % 2 == 1)
        ddp.module[2].requires_grad_(step % 2 == 0)
        train(ddp, optimizer, [step], rank, 2)
    ddp.sync_parameters()
    assert_same_everywhere(ddp)


@pytest.mark.parametrize("given", ["scope", "before"])
@kept_ranks(2, group="gloo")
def test_a_weight_that_is_given_before_the_forward_that_ends_the_warm_up(rank, given):
    """That forward makes a new `BackwardSync`, which must get the weight."""
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(8, warmup_steps=1))
    reference = network(torch.float64)
    for step in range(3):
        x, weight = rows(step, 2)[rank::2], [3.0, 1.0][rank]
        ddp.zero_grad()
        scope = ddp.weight(weight)
        if given == "scope":
            with scope:
                ddp(x).square().mean().backward()
        else:
            ddp(x).square().mean().backward()
        means = [reference(rows(step, 2)[each::2].double()).square().mean() for each in range(2)]
        expected = torch.autograd.grad((3 * means[0] + means[1]) / 4, list(reference.parameters()))
        for parameter, value in zip(ddp.parameters(), expected, strict=True):
            assert_allclose(parameter.grad.numpy(), value.numpy(), rtol=1e-4, atol=1e-6)
    assert ddp._outer_sync is not None


@kept_ranks(2, group="gloo")
def test_weights_of_micro_batches_at_the_end_of_the_warm_up(rank):
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(8, warmup_steps=1))
    reference = network(torch.float64)
    for step in range(3):
        ddp.zero_grad()
        total = 0.0
        for micro, weight in enumerate([3.0, 1.0]):
            x = rows(2 * step + micro, 2)
            with ddp.no_sync() if micro == 0 else contextlib.nullcontext(), ddp.weight(weight):
                ddp(x[rank::2]).square().mean().backward()
            total = total + weight * reference(x.double()).square().mean()  # all rows: each rank has half
        expected = torch.autograd.grad(total / 4, list(reference.parameters()))
        for parameter, value in zip(ddp.parameters(), expected, strict=True):
            assert_allclose(parameter.grad.numpy(), value.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "warmup_steps, counts, num_hosts",
    [(3, (2, 7), 1), (3, (2, 7), 2), (3, (3, 7), 2), (3, (2, 2), 2), (0, (0, 5), 1), (0, (0, 5), 2)],
)
@kept_ranks(2, group="gloo")
def test_uneven_data_at_the_end_of_the_warm_up(rank, warmup_steps, counts, num_hosts):
    place(rank, num_hosts)
    options = LocalSGD(2, outer_lr=1, outer_momentum=0, warmup_steps=warmup_steps)
    ddp = DistributedDataParallel(network(), timeout_s=10, local_sgd=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for _ in range(2):  # epochs
        for step in ddp.iterate(range(counts[rank]), optimizer.step):
            train(ddp, optimizer, [step], rank, 2)
        assert_same_everywhere(ddp)


def loaded_again(ddp: DistributedDataParallel) -> DistributedDataParallel:
    again = DistributedDataParallel(copy.deepcopy(ddp.module), timeout_s=20, local_sgd=ddp._config.local_sgd)
    again.load_local_sgd_state_dict(ddp.local_sgd_state_dict())
    return again


@pytest.mark.parametrize("go_on", [loaded_again, copy.deepcopy])
@kept_ranks(2, group="gloo")
def test_the_end_of_an_epoch_is_not_a_step_of_the_warm_up(rank, go_on):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), timeout_s=20, local_sgd=LocalSGD(1, warmup_steps=4))
    reference = Simulation([[0, 1]], (1.0, 0.0, False))
    for epoch in range(2):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        for step in ddp.iterate(range(2 * epoch, 2 * epoch + 2), optimizer.step):
            train(ddp, optimizer, [step], rank, 2)
            reference.step(step)
        assert ddp.local_sgd_state_dict()["steps"] == 2 * epoch + 2
        ddp = go_on(ddp)
    for value, expected in zip(values_of(ddp), values_of(reference.replicas[0]), strict=True):
        assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@kept_ranks(2, group="gloo")
def test_a_copy_does_not_warm_up_again(rank):
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2, warmup_steps=2))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(3), rank, 2)
    twin = copy.deepcopy(copy.deepcopy(ddp))
    train(twin, torch.optim.SGD(twin.parameters(), lr=LR), range(1), rank, 2)
    assert twin._outer_sync is not None
    assert twin.local_sgd_state_dict()["steps"] == 4


COPIES = {
    "deep copy": copy.deepcopy,
    "copy of a copy": lambda ddp: copy.deepcopy(copy.deepcopy(ddp)),
    "pickle": lambda ddp: pickle.loads(pickle.dumps(ddp)),
}


# How the wrapper is copied does not depend on the ranks that it syncs with, nor on the moment.
@pytest.mark.parametrize(
    "between, num_hosts, warmup_steps, how, moments",
    [
        ("hosts", 2, 3, "deep copy", (0, 1, 3, 5, "sync")),
        ("hosts", 2, 0, "pickle", (1, 3, "sync")),
        ("hosts", 1, 0, "copy of a copy", (3,)),
        ("ranks", 1, 0, "pickle", (1, "sync")),
    ],
)
@kept_ranks(4, group="gloo")
def test_a_copy_continues_like_the_original(rank, between, num_hosts, warmup_steps, how, moments):
    """It is copied between two syncs, before a sync that is due, and after one."""
    place(rank, num_hosts)
    options = LocalSGD(3, between=between, warmup_steps=warmup_steps)
    ends = []
    for copied_after in (None, *moments):
        ddp = DistributedDataParallel(network(), timeout_s=60, local_sgd=options)
        for step in range(8):
            if step == 4:
                ddp.sync_parameters()
            if copied_after == step or (copied_after == "sync" and step == 4):
                ddp = COPIES[how](ddp)
                assert ddp.gradient_path == "nothing"  # until it is connected
            train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), [step], rank, 4)
        ddp.sync_parameters()
        assert_same_everywhere(ddp)
        state = ddp.local_sgd_state_dict()
        ends.append([*values_of(ddp), *(value.numpy() for value in state["momentum"].values())])
    for end in ends[1:]:
        for got, expected in zip(end, ends[0], strict=True):
            assert_array_equal(got, expected)


@pytest.mark.parametrize("how", list(COPIES))
@kept_ranks(2, group="gloo")
def test_a_copy_trains_what_was_frozen_when_it_was_made(rank, how):
    place(rank, 2)
    ends = []
    for copies in (False, True):
        ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(3), rank, 2)
        ddp.module[0].requires_grad_(False)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), [3], rank, 2)
        ddp = COPIES[how](ddp) if copies else ddp
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), [4], rank, 2)
        ddp.module[0].requires_grad_(True)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(5, 8), rank, 2)
        ddp.sync_parameters()
        ends.append(values_of(ddp))
    for got, expected in zip(*ends, strict=True):
        assert_array_equal(got, expected)


@kept_ranks(2, group="gloo")
def test_a_copy_has_the_state_before_it_is_connected_and_can_load_another(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(3), rank, 2)
    ddp.sync_parameters()
    state = ddp.local_sgd_state_dict()
    twin = copy.deepcopy(ddp)
    for part in ("parameters", "momentum"):
        for name, value in twin.local_sgd_state_dict()[part].items():
            assert torch.equal(value, state[part][name])
    assert twin.local_sgd_state_dict()["steps"] == 3 and state["since_sync"] == 0
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(3), rank, 2)  # the copy has its own state
    ddp.sync_parameters()
    late = ddp.local_sgd_state_dict()
    twin.load_local_sgd_state_dict(late)
    twin.module.load_state_dict(ddp.module.state_dict())
    for net in (ddp, twin):
        train(net, torch.optim.SGD(net.parameters(), lr=LR), range(3, 6), rank, 2)
        net.sync_parameters()
    for got, expected in zip(values_of(twin), values_of(ddp), strict=True):
        assert_array_equal(got, expected)


@pytest.mark.parametrize("what", ["syncs", "members", "some"])
@kept_ranks(4, group="gloo")
def test_copies_that_do_not_belong_together_are_refused_on_all_ranks(rank, what):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), timeout_s=60, local_sgd=LocalSGD(2))
    untrained, optimizer = copy.deepcopy(ddp), torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(3), rank, 4)
    early = copy.deepcopy(ddp)
    ddp.sync_parameters()
    if what == "syncs":
        twin, error = (copy.deepcopy(ddp) if rank == 3 else early), "rank 3 of 4 cannot go on as a copy"
    elif what == "members":
        twin, error = copy.deepcopy(early), "rank 1 of 4 cannot go on as a copy"
        if rank == 1:
            with torch.no_grad():
                twin.module[0].weight.mul_(2)
    else:  # the other ranks have a copy from before the training
        twin, error = (early if rank < 2 else untrained), "local SGD begins with"
    with pytest.raises(ModelMismatchError, match=f"(?i){error}"):
        train(twin, torch.optim.SGD(twin.parameters(), lr=LR), [3], rank, 4)


@kept_ranks(2, group="gloo")
def test_each_host_may_load_its_own_state_after_uneven_data(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for step in ddp.iterate(range([3, 7][rank]), optimizer.step):
        train(ddp, optimizer, [step], rank, 2)
    again = DistributedDataParallel(copy.deepcopy(ddp.module), local_sgd=LocalSGD(2))
    again.load_local_sgd_state_dict(ddp.local_sgd_state_dict())
    train(again, torch.optim.SGD(again.parameters(), lr=LR), range(3), rank, 2)
    again.sync_parameters()
    assert_same_everywhere(again)


@kept_ranks(2, group="gloo")
def test_states_of_different_steps_are_refused_in_the_warm_up(rank):
    ddp = DistributedDataParallel(network(), timeout_s=10, local_sgd=LocalSGD(2, warmup_steps=2))
    state = {"steps": 4 * rank, "since_sync": 0, "parameters": {}, "momentum": {}}
    with pytest.raises(ModelMismatchError, match="rank 1 of 2 loads another state than rank 0"):
        ddp.load_local_sgd_state_dict(state)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(4), rank, 2)
    ddp.sync_parameters()
    assert_same_everywhere(ddp)


class Product(nn.Module):
    """The sum of absolute values of a parameter times its input."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@kept_ranks(2, group="gloo")
def test_dtypes(rank, dtype):
    place(rank, 2)
    parameter = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=dtype).t())
    net = Product(parameter)
    ddp = DistributedDataParallel(net, local_sgd=LocalSGD(1, outer_lr=1, outer_momentum=0))
    ddp(torch.ones(2, 2)).backward()
    with torch.no_grad():
        parameter -= [0.5, 0.25][rank]
    ddp.sync_parameters()
    assert_allclose(
        parameter.detach().to(torch.complex128).numpy(), np.array([[1, 3], [2, -4]]) - 0.375, rtol=1e-12
    )


@kept_ranks(2, group="gloo")
def test_small_steps_of_16_bit_parameters_are_not_lost(rank):
    net = Product(nn.Parameter(torch.ones(1, dtype=torch.bfloat16)))
    ddp = DistributedDataParallel(
        net, local_sgd=LocalSGD(1, outer_lr=0.125, outer_momentum=0, between="ranks")
    )
    for _ in range(4):
        ddp(torch.ones(1)).backward()
        with torch.no_grad():
            net.weight += 0.0078125  # one unit of bfloat16 at 1.0, of which rounding would lose an eighth
        ddp.sync_parameters()
    # Four eighths of a unit: the parameters of the last sync are kept in float32.
    assert ddp.local_sgd_state_dict()["parameters"]["weight"].item() == 1.0 + 4 * 0.0078125 / 8


class Averaged(nn.Module):
    """A buffer that each rank fills with its own number, and a parameter."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.number = number
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.fill_(self.number)
        self.mean.fill_(self.number)
        return (self.weight * x).sum()


@kept_ranks(2, group="gloo")
def test_a_state_saved_between_syncs_warns_that_it_lacks_the_weights(rank):
    place(rank, 1)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    with ddp.weight(3.0):
        train(ddp, optimizer, range(1), rank, 2)
    with pytest.warns(RuntimeWarning, match=r"since_sync=1\), without its weights"):
        assert ddp.local_sgd_state_dict()["since_sync"] == 1
    ddp.sync_parameters()
    assert ddp.local_sgd_state_dict()["since_sync"] == 0


@kept_ranks(4, group="gloo")
def test_buffers_agree_within_a_host_after_each_backward_and_everywhere_after_a_sync(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(Averaged(rank + 1.0), buffers={"mean": "average"}, local_sgd=LocalSGD(2))
    ddp(torch.ones(1)).backward()
    host = rank // 2
    assert (ddp.module.seen.item(), ddp.module.mean.item()) == (2.0 * host + 1, 2.0 * host + 1.5)
    ddp.sync_parameters()
    assert (ddp.module.seen.item(), ddp.module.mean.item()) == (1.0, 2.5)


@kept_ranks(2, group="gloo")
def test_a_resumed_run_continues_as_if_it_had_not_stopped(rank, tmp_path_factory=None):
    place(rank, 2)
    options = LocalSGD(2, warmup_steps=1)

    def begin() -> tuple[Any, Any]:
        ddp = DistributedDataParallel(network(), local_sgd=options)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=LR)

    ddp, optimizer = begin()
    early = ddp.local_sgd_state_dict()
    assert early == {"steps": 0, "since_sync": 0, "parameters": {}, "momentum": {}}
    train(ddp, optimizer, range(6), rank, 2)
    ddp.sync_parameters()
    outer, weights = ddp.local_sgd_state_dict(), {n: v.clone() for n, v in ddp.module.state_dict().items()}
    assert outer["steps"] == 6 and outer["since_sync"] == 0
    train(ddp, optimizer, range(6, 9), rank, 2)

    resumed, optimizer = begin()
    resumed.load_state_dict(weights)
    resumed.load_local_sgd_state_dict(outer)
    train(resumed, optimizer, range(6, 9), rank, 2)
    for value, expected in zip(values_of(resumed), values_of(ddp), strict=True):
        assert_array_equal(value, expected)
    assert resumed.local_sgd_state_dict()["steps"] == 9

    still_warm, optimizer = begin()
    still_warm.load_local_sgd_state_dict(early)
    train(still_warm, optimizer, range(1), rank, 2)
    assert_same_everywhere(still_warm)


@kept_ranks(2, group="gloo")
def test_wrong_states_are_refused(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=LR), range(3), rank, 2)
    ddp.sync_parameters()
    good = ddp.local_sgd_state_dict()
    weight = good["parameters"]["0.weight"]
    without = {name: value for name, value in good["parameters"].items() if name != "2.bias"}
    for wrong, words in (
        (ddp.module.state_dict(), "no state of local SGD"),
        ([1], "no state of local SGD"),
        (good | {"steps": -1}, "no state of local SGD"),
        (good | {"parameters": without}, r"(?s)another model.*missing: 2.bias"),
        (good | {"momentum": {"head": weight}}, r"(?s)another model.*not in the model: head"),
        (
            good | {"parameters": good["parameters"] | {"0.weight": weight[1:]}},
            r"(?s)'0.weight'.*shape \(4, 6\)",
        ),
        (good | {"momentum": {"0.weight": [1.0]}}, r"(?s)'0.weight'.*got +list"),
    ):
        with pytest.raises(ConfigError, match=words):
            ddp.load_local_sgd_state_dict(wrong)
    other = good | {"momentum": {"0.weight": weight + rank}}
    with pytest.raises(ModelMismatchError, match="rank 1 of 2 loads another state"):
        ddp.load_local_sgd_state_dict(other)
    plain = DistributedDataParallel(network())
    plain.sync_parameters()
    for call in (plain.local_sgd_state_dict, lambda: plain.load_local_sgd_state_dict(good)):
        with pytest.raises(ConfigError, match="wrapped without local_sgd"):
            call()


@kept_ranks(2, group="gloo")
def test_options_and_calls_that_exclude_it_are_refused(rank):
    with pytest.raises(ConfigError, match="deterministic"):
        DistributedDataParallel(network(), local_sgd=LocalSGD(2), deterministic="world")
    with pytest.raises(ConfigError, match="a LocalSGD"):
        DistributedDataParallel(network(), local_sgd=16)
    with pytest.raises(ModelMismatchError, match="local_sgd"):
        DistributedDataParallel(network(), local_sgd=LocalSGD(2 + rank))
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    with pytest.raises(ConfigError, match="communication hook"):
        ddp.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ConfigError, match="finish"):
        ddp.join()
    with pytest.raises(ConfigError, match="equal"):
        ddp._update_process_group(None)
    shared = network()
    first, second = (DistributedDataParallel(shared, local_sgd=LocalSGD(1)) for _ in range(2))
    (first(rows(0, 2)).sum() + second(rows(0, 2)).sum()).backward()
    with pytest.raises(ConfigError, match="another wrapped model"):
        first.sync_parameters()


@pytest.mark.parametrize("every", [1, 4])
@kept_ranks(2, group="gloo")
def test_bytes_between_hosts_are_those_of_one_step_in_every(rank, every):
    place(rank, 2)
    sent: list[int] = []
    sending = noting(GlooTransport.sending, lambda message, _: sent.append(message.nbytes))
    GlooTransport.sending = sending
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(every) if every > 1 else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(4), rank, 2)
    ddp.sync_parameters()
    size = sum(parameter.nbytes for parameter in ddp.parameters())
    assert size * 4 / every < sum(sent) < (size + 600) * 4 / every  # headers, gaps, reports


@kept_ranks(2, group="gloo")
def test_compression_between_hosts_applies_to_syncs(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(
        network(), compress_between_hosts="int8", local_sgd=LocalSGD(2, outer_lr=1, outer_momentum=0)
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    reference = Simulation([[0], [1]], (1.0, 0.0, True))
    train(ddp, optimizer, range(2), rank, 2)
    begun = values_of(network())
    for step in range(2):
        reference.step(step)
    reference.sync()
    ddp.sync_parameters()
    assert_same_everywhere(ddp)
    for value, expected, first in zip(values_of(ddp), reference.begun, begun, strict=True):
        unit = np.abs(expected - first).max() / 127
        assert 0 < np.abs(value - expected).max() < 4 * unit


@pytest.mark.parametrize(
    "compression, world_size, num_hosts", [("topk", 2, 2), ("topk", 4, 2), ("int8", 3, 3)]
)
@kept_ranks("world_size", group="gloo")
def test_updates_of_a_failed_sync_arrive_once(rank, world_size, compression, num_hosts):
    """A failed sync is repeated, so it may leave no residual: the bits are those of a run without it."""
    place(rank, num_hosts)
    ends = []
    for fails in (0, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4096, 2), nn.Linear(2, 1))
        options = LocalSGD(1, outer_lr=1, outer_momentum=0)
        ddp = DistributedDataParallel(net, compress_between_hosts=compression, local_sgd=options)
        x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(rank))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        for step in range(6):
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
            before = net[1].weight.detach().clone()
            for _ in range(fails if step == 1 else 0):
                if rank == 1:
                    net[1].weight.data.fill_(float("nan"))
                with pytest.raises(NonFiniteGradientError):
                    ddp.sync_parameters()
                net[1].weight.data.copy_(before)
        ddp.sync_parameters()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]))
    assert_array_equal(ends[0].numpy(), ends[1].numpy())


@kept_ranks(4, group="gloo")
def test_errors_within_a_host_say_which_ranks_they_count(rank):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2), nonfinite="raise")
    x = rows(0, 4)[rank::4]
    if rank == 3:
        x = x * float("nan")
    if rank < 2:
        ddp(x).sum().backward()
        assert ddp.nonfinite() == {}
        return
    with pytest.raises(NonFiniteGradientError, match=r"(?s)on rank 1 of 2.*host 1, which has ranks 2-3 of 4"):
        ddp(x).sum().backward()
    assert set(ddp.nonfinite()) == {3}


@pytest.mark.parametrize("is_in_sync", [True, False])
@ranks(4, group="gloo", dies={3: signal.SIGKILL})
def test_a_rank_that_is_killed_is_named_at_the_sync_and_no_parameter_changes(rank, is_in_sync):
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    train(ddp, optimizer, range(3), rank, 4)
    torch.distributed.barrier()
    if rank == 3 and is_in_sync:
        OuterTensors.put_change = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank < 2 and not is_in_sync:  # the other host waits for no rank until the sync
        train(ddp, optimizer, [3], rank, 4)
    before = values_of(ddp)
    with pytest.raises(PeerLostError) as caught:
        ddp.sync_parameters()
    assert caught.value.lost == (3,)
    for value, expected in zip(values_of(ddp), before, strict=True):
        assert_array_equal(value, expected)
