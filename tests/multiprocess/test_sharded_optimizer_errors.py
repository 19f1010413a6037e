"""Differences between ranks, and an error on one rank, raise on all ranks before anything is written."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join

from paceline import _core
from paceline.errors import (
    CollectiveError,
    ConfigError,
    DeadlineError,
    MismatchError,
    ModelMismatchError,
    PeerLostError,
    TornStepError,
    UnusedParameterError,
)
from paceline.sharding.step_exchange import MemoryTravel
from paceline.torch import DistributedDataParallel, LocalSGD, ShardedOptimizer
from paceline.torch.ops import OPS
from tests.harness import kept_ranks, ranks
from tests.multiprocess.rank_signals import barrier, publish, wait_until_published
from tests.multiprocess.test_local_sgd import network, place, rows
from tests.multiprocess.test_sharded_optimizer import make_parameters, same_bits

PATHS = pytest.mark.parametrize("path", ["memory", "group"])
LONG_S = 300.0  # longer than the harness waits


def make(path: str = "memory", **options: Any) -> tuple[list[nn.Parameter], ShardedOptimizer]:
    parameters = [nn.Parameter(torch.ones(700)), nn.Parameter(torch.ones(600))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    named = [("a.weight", parameters[0]), ("b.weight", parameters[1])]
    options = {"lr": 0.5, "reduce_through": path, "timeout_s": LONG_S, **options}
    return parameters, ShardedOptimizer(named, optim.SGD, **options)


@PATHS
@kept_ranks(3, group="gloo")
def test_different_steps_are_reported_before_anything_is_written(rank: int, path: str) -> None:
    parameters, optimizer = make(path)
    before = [parameter.detach().clone() for parameter in parameters]

    optimizer.param_groups[0]["lr"] = 0.25 if rank == 1 else 0.5
    with pytest.raises(MismatchError) as caught:
        optimizer.step()
    assert "different hyperparameters: lr of group 0" in str(caught.value)
    assert "ranks 0, 2: lr of group 0: 0.5\n" in str(caught.value)
    assert "rank 1: lr of group 0: 0.25" in str(caught.value)
    assert caught.value.names == ("lr of group 0",)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)

    if rank == 2:
        parameters[1].grad = None
    with pytest.raises(UnusedParameterError) as unused:
        optimizer.step()
    assert unused.value.unused == {"b.weight": (2,)}
    assert "rank 2 without: b.weight" in str(unused.value)
    parameters[1].grad = torch.ones_like(parameters[1])

    rate.fill_(0.25 if rank == 1 else 0.5)  # in place
    with pytest.raises(MismatchError, match="different hyperparameters: lr of group 0"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5

    with pytest.raises(MismatchError) as calls:
        optimizer.consolidate_state_dict() if rank == 0 else optimizer.step()
    assert "rank 0: consolidate_state_dict()" in str(calls.value)

    if rank == 0:
        parameters[0].grad = torch.ones(700).to_sparse()
    with pytest.raises(ConfigError) as sparse:
        optimizer.step()
    assert "the gradient of parameter 'a.weight' is sparse" in str(sparse.value)
    assert rank == 0 or "rank 0 of 3 cannot make the step" in str(sparse.value)
    parameters[0].grad = torch.ones(700)

    assert all(map(same_bits, parameters, before))
    optimizer.step()
    assert not any(map(same_bits, parameters, before))
    assert all(parameter.eq(0.5).all() for parameter in parameters)


@kept_ranks(2, group="gloo")
def test_a_parameter_that_is_resized_on_one_rank_is_reported_on_all(rank: int) -> None:
    parameters, optimizer = make()
    if rank == 1:
        parameters[0].data = torch.ones(800)
        parameters[0].grad = torch.ones(800)
    with pytest.raises(ConfigError, match=r"'a\.weight' has been resized or replaced"):
        optimizer.step()


@PATHS
@kept_ranks(2, group="gloo")
def test_different_arguments_are_reported_when_the_optimizer_is_made(rank: int, path: str) -> None:
    with pytest.raises(ModelMismatchError, match="lr of group 0 differs"):
        make(path, lr=0.1 * (1 + rank))
    with pytest.raises(ModelMismatchError, match="'0 of group 0'"):
        ShardedOptimizer([nn.Parameter(torch.ones(4 + rank))], optim.SGD, timeout_s=LONG_S)
    with pytest.raises(ConfigError) as caught:
        make(path, weight_decay=-1.0 if rank == 1 else 0.0)
    assert "Invalid weight_decay value" in str(caught.value)
    assert rank == 1 or "Rank 1 of 2 could not make the optimizer" in str(caught.value)
    _, optimizer = make(path)
    with pytest.raises(ConfigError, match="params"):
        optimizer.add_param_group({"params": None if rank == 0 else [("c", nn.Parameter(torch.ones(2)))]})
    with pytest.raises(ModelMismatchError, match="momentum of group 1"):
        optimizer.add_param_group({"params": [("c", nn.Parameter(torch.ones(2)))], "momentum": 0.5 * rank})
    assert len(optimizer.param_groups) == len(optimizer._template.param_groups) == 1
    optimizer.step()


@PATHS
@kept_ranks(2, group="gloo")
def test_a_step_on_one_rank_names_the_other_at_the_deadline(rank: int, path: str) -> None:
    parameters, optimizer = make(path)
    optimizer.step()
    barrier("both have made a step", rank)
    if rank == 1:
        wait_until_published("given up", [0])
        return
    if path == "memory":  # from here on, this one wait has a short deadline
        hasty = MemoryTravel(optimizer._communicator.core.with_patience(0.5, 100.0), OPS)
        optimizer._steps._barriers._gather = hasty.gather
    else:
        optimizer._communicator._calls.waits._timeout_s = 0.5
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(DeadlineError) as caught:
        optimizer.step()
    assert "rank 1" in str(caught.value) and caught.value.late == (1,)
    assert "nothing was written yet" in str(caught.value) and caught.value.step_is_complete
    assert all(map(same_bits, parameters, before))
    publish("given up", rank)


@pytest.mark.parametrize("where", ["before", "within"])
@ranks(2, group="gloo", dies={1: signal.SIGKILL})
def test_half_a_step_left_by_a_killed_rank_is_reported(rank: int, where: str) -> None:
    """In the first barrier, nothing is written yet; in the second, the survivor reports half a step."""
    parameters, optimizer = make()
    optimizer.step()
    if rank == 1:
        arrival = _core.fault_points().index("before_arrive")
        _core.arm_fault(arrival, _core.FAULT_ACTIONS["kill"], 1 if where == "before" else 2)
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(PeerLostError) as caught:
        optimizer.step()
    assert caught.value.lost == (1,)
    unchanged = list(map(same_bits, parameters, before))
    if where == "before":
        assert "nothing was written yet" in str(caught.value)
        assert all(unchanged)
        return
    assert "some parameters may be updated and others not" in str(caught.value)
    assert unchanged == [False, True]  # rank 0's shard, except the end of the first parameter
    with pytest.raises(CollectiveError, match="an earlier step was not completed"):
        optimizer.step()


@ranks(2, group="gloo", dies={1: signal.SIGKILL})
def test_a_rank_that_dies_over_a_process_group(rank: int) -> None:
    _, optimizer = make("group")
    optimizer.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        optimizer.step()
    assert caught.value.lost == (1,) and caught.value.step_is_complete


class Failing(optim.SGD):
    """Raises in its step once `fails` is set."""

    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            raise MemoryError("no room for the update")
        super().step()


@PATHS
@pytest.mark.parametrize("is_shared", [False, True])
@kept_ranks(3, group="gloo")
def test_a_rank_that_raises_in_its_step_is_reported_at_once(rank: int, path: str, is_shared: bool) -> None:
    """It catches its own exception, so its process does not end, and only the rank itself can report it."""
    model = nn.Linear(30, 30)
    ddp = DistributedDataParallel(model, share_parameters=is_shared, timeout_s=LONG_S)
    optimizer = ShardedOptimizer(ddp.parameters(), Failing, lr=0.1, reduce_through=path, timeout_s=LONG_S)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.optim.fails = rank == 1
    with pytest.raises(MemoryError if rank == 1 else PeerLostError) as caught:
        optimizer.step()
    if rank != 1:
        assert caught.value.lost == (1,) and caught.value.step_is_complete is False
        assert "MemoryError: no room for the update" in str(caught.value)
    with pytest.raises(TornStepError) as torn:
        ddp(torch.ones(1, 30))
    if is_shared and rank != 1:  # this rank has waited for all ranks that write
        assert "rank 1 of this host wrote no part" in str(torn.value)
    publish("raised", rank)
    wait_until_published("raised", [0, 1, 2])


class Refusing(optim.SGD):
    """Raises before it writes anything, or after it has written some tensors; with None it does not raise."""

    refuses: str | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.refuses == "after":
            super().step()
        if self.refuses is not None:
            raise ValueError("no such step")
        super().step()


@kept_ranks(2, group="gloo")
def test_a_fused_step_in_which_all_ranks_raise_counts_as_half_made(rank: int) -> None:
    """Tensor versions do not show whether its kernel has written."""
    model = nn.Linear(30, 30)
    ddp = DistributedDataParallel(model, timeout_s=LONG_S)
    optimizer = ShardedOptimizer(ddp.parameters(), Refusing, lr=0.1, fused=True, timeout_s=LONG_S)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.optim.refuses = "after"
    with pytest.raises(ValueError, match="no such step"):
        optimizer.step()
    with pytest.raises(TornStepError):
        ddp(torch.ones(1, 30))


@kept_ranks(1, group="gloo")
def test_a_step_that_is_refused_in_a_single_process(rank: int) -> None:
    model = nn.Linear(3, 3)
    optimizer = ShardedOptimizer(model.parameters(), Refusing, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.optim.refuses = "before"
    with pytest.raises(ValueError, match="no such step"):
        optimizer.step()
    optimizer.optim.refuses = None
    optimizer.step()


@kept_ranks(2, group="gloo")
def test_half_a_step_is_an_error_until_parameters_are_loaded(rank: int) -> None:
    """Loading the optimizer's state is not enough, whether with this optimizer or with another."""
    parameters, optimizer = make()
    model = nn.ParameterList(parameters)
    wrapped = DistributedDataParallel(Sum(model))
    optimizer.step()
    parameters_then = copy.deepcopy(model.state_dict())
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if rank == 0 else optim.SGD(parameters, lr=0.5).state_dict()
    optimizer._steps._travel.spread = interrupted  # type: ignore[method-assign, union-attr]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del optimizer._steps._travel.spread  # type: ignore[union-attr]
    optimizer.load_state_dict(state)
    with pytest.raises(TornStepError):
        wrapped(torch.ones(1))
    with pytest.raises(TornStepError):
        wrapped.state_dict()
    with pytest.raises(TornStepError):
        optimizer.step()
    model.load_state_dict(parameters_then)
    wrapped.state_dict()


class Sum(nn.Module):
    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.all = parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() * sum(parameter.sum() for parameter in self.all)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@kept_ranks(2, group="gloo")
def test_a_first_step_with_a_journal_that_one_rank_refuses(rank: int) -> None:
    """The other ranks get the reason before all make the journal, and the next step makes it."""
    model = nn.Linear(30, 30)
    ddp = DistributedDataParallel(model, share_parameters=True, timeout_s=LONG_S)
    optimizer = ShardedOptimizer(
        ddp.parameters(), optim.AdamW, lr=0.1, journal=True, reduce_through="memory", timeout_s=LONG_S
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == 1:
        model.weight.grad = torch.ones(30, 30).to_sparse()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()
    model.weight.grad = torch.ones(30, 30)
    before = model.weight.detach().clone()
    optimizer.step()
    assert not same_bits(model.weight, before)


@kept_ranks(2, group="gloo")
def test_the_error_after_an_abandoned_step_shows_what_to_do(rank: int) -> None:
    """No rank writes after one has reported that nothing was written, and neither does another optimizer."""
    ddp = DistributedDataParallel(nn.Linear(30, 30), share_parameters=True)
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    first, second = (ShardedOptimizer(ddp.parameters(), optim.SGD, lr=0.1) for _ in range(2))
    first._steps._step_tables.refuse()  # as after a deadline
    barrier("given up", rank)
    with pytest.raises(CollectiveError, match="could not meet all ranks") as caught:
        second.step()
    assert caught.value.step_is_complete and "another optimizer of these parameters" in caught.value.likely
    assert "wrap the model anew" in caught.value.hint


def uneven(rank: int, *, journal: bool) -> tuple[DistributedDataParallel, ShardedOptimizer, int]:
    """Return a model, an optimizer, and the number of this rank's batches: rank 2 has the fewest."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(30, 90), share_parameters=True, timeout_s=LONG_S)
    optimizer = ShardedOptimizer(
        ddp.parameters(), optim.AdamW, lr=0.1, journal=journal, reduce_through="memory", timeout_s=LONG_S
    )
    return ddp, optimizer, 1 if rank == 2 else 3


@ranks(3, group="gloo", dies={1: signal.SIGKILL})
def test_a_rank_without_data_reports_that_another_completed_the_step(rank: int) -> None:
    """It has no gradients to complete the lost rank's shard, but raises the same error as the others."""
    ddp, optimizer, batches = uneven(rank, journal=True)

    def train() -> None:
        with Join([ddp, optimizer]):
            for number in range(batches):
                ddp(torch.ones(1, 30)).square().mean().backward()
                if rank == 1 and number == 2:
                    opened = _core.fault_points().index("block_opened")
                    _core.arm_fault(opened, _core.FAULT_ACTIONS["kill"], 1)
                optimizer.step()

    with pytest.raises(PeerLostError) as caught:
        train()
    assert caught.value.lost == (1,) and caught.value.step_is_complete
    publish("raised", rank)
    wait_until_published("raised", [0, 2])


@kept_ranks(3, group="gloo")
def test_a_rank_without_data_that_fails_in_the_barrier(rank: int) -> None:
    """Another rank has passed the barrier and begun: the step is half made, and all ranks raise."""
    ddp, optimizer, batches = uneven(rank, journal=False)
    barriers = optimizer._steps._barriers
    assert barriers is not None
    gather = barriers._gather

    def lost(numbers: bytes) -> bytes:
        gather(numbers)
        wait_until_published("begun", [0])
        raise PeerLostError("Rank 1 of 3 died.", lost=(1,))

    def train() -> None:
        with Join([ddp, optimizer]):
            for _ in range(batches):
                ddp(torch.ones(1, 30)).square().mean().backward()
                optimizer.step()

    if rank == 2:
        barriers._gather = lambda numbers: lost(numbers) if barriers.number > 1 else gather(numbers)
    if rank == 0:
        begin = optimizer._steps._step_tables.begin

        def begun() -> bool:
            has_begun = begin()
            if barriers.number > 1:
                publish("begun", 0)
            return has_begun

        optimizer._steps._step_tables.begin = begun  # type: ignore[method-assign]
    with pytest.raises(PeerLostError) as caught:
        train()
    assert caught.value.step_is_complete is False
    with pytest.raises(TornStepError):
        ddp.state_dict()
    publish("raised", rank)
    wait_until_published("raised", [0, 1, 2])


class Coupled(optim.SGD):
    """Clips by the norm of all gradients that it gets."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


@kept_ranks(2, group="gloo")
def test_arguments_that_are_refused(rank: int) -> None:
    parameter = nn.Parameter(torch.ones(300))
    for optimizer_class, options, words in (
        (optim.LBFGS, {}, "whose step() needs no closure"),
        (optim.SparseAdam, {}, "dense gradients"),
        (Coupled, {}, "updates every parameter by itself"),
        (optim.Adam, {"differentiable": True}, "differentiable=True"),
        (optim.Adam, {"overlap_with_ddp": True}, "overlap_with_ddp=True"),
        (optim.Adam, {"reduce_through": "air"}, "reduce_through='air'"),
        (optim.Adam, {"lr": -1.0}, "Invalid learning rate"),
        (optim.Adam, {"momentum": 0.1}, "unexpected keyword argument 'momentum'"),
        (optim.Adam, {"timeout_s": 0}, "timeout_s=0"),
        (optim.Adam, {"process_group": "gloo"}, "process_group='gloo'"),
        (optim.Adam([parameter]), {}, "a class of optimizers"),
        ("Adam", {}, "optimizer_class='Adam'"),
    ):
        with pytest.raises(ConfigError) as caught:
            ShardedOptimizer([parameter], optimizer_class, **options)
        assert words in str(caught.value), (words, str(caught.value))
    for params, words in (
        (parameter, "params="),
        ([], "at least one"),
        ([parameter, parameter], "some parameter several times"),
        ([{"params": {parameter}}], "the order in a set"),
        ([{"params": 5}], "params=5"),
        ([{"lr": 0.1}], "params="),
        ([1.0], "params=1.0"),
        ([parameter * 2], "leaves of the graph"),
        ([("a", parameter), nn.Parameter(torch.ones(2))], "with/without names"),
        ([nn.Parameter(torch.ones(2, device="meta"))], "on the device meta"),
    ):
        with pytest.raises(ConfigError) as caught:
            ShardedOptimizer(params, optim.Adam)
        assert words in str(caught.value), (words, str(caught.value))


@kept_ranks(2, group="gloo")
def test_the_random_state_does_not_change(rank: int) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    ShardedOptimizer(make_parameters(), optim.AdamW)
    assert torch.equal(torch.random.get_rng_state(), before)


@kept_ranks(2, group="gloo")
def test_replica_groups_of_local_sgd_cannot_share_an_optimizer(rank: int) -> None:
    place(rank, 2)
    ddp = DistributedDataParallel(network(), local_sgd=LocalSGD(every=4, warmup_steps=1))
    optimizer = ShardedOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    alone = optim.SGD(ddp.parameters(), lr=0.1)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        ddp(rows(step, 2)[rank::2]).square().mean().backward()

    backward(0)
    optimizer.step()  # in the warm-up, all ranks have the same model
    backward(1)
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    with pytest.raises(ConfigError, match="do not train the same model") as caught:
        optimizer.step()
    assert "rank 0: host 0, which has rank 0 of 2" in str(caught.value)
    assert "rank 1: host 1, which has rank 1 of 2" in str(caught.value)
    assert all(map(same_bits, ddp.parameters(), before))
    alone.step()
    backward(2)


@PATHS
@kept_ranks(2, group="gloo")
def test_an_optimizer_that_makes_no_step_is_refused_when_it_is_made(rank: int, path: str) -> None:
    """On every rank, with the optimizer's error; the group still works afterwards."""
    parameters = make_parameters()
    with pytest.raises(ConfigError, match=r"(?s)Adam makes no step.*capturable") as caught:
        ShardedOptimizer(parameters, optim.Adam, lr=0.1, capturable=True, reduce_through=path)
    assert "torch.float32 on cpu" in str(caught.value)
    optimizer = ShardedOptimizer(parameters, optim.Adam, lr=0.1, reduce_through=path)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
