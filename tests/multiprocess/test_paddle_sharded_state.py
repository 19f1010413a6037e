"""The state of paceline.paddle.ShardedOptimizer, saved and loaded in both directions; and what it refuses."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle import optimizer as optim
from paddle.utils import unique_name

from paceline import _core
from paceline.errors import (
    CollectiveError,
    ConfigError,
    MismatchError,
    ModelMismatchError,
    PacelineError,
    PeerLostError,
    UnusedParameterError,
)
from paceline.paddle import DataParallel, LocalSGD, ShardedOptimizer
from tests.multiprocess.paddle_models import batch, drop_grad, kept_ranks, ranks, share, squares, two_layers
from tests.multiprocess.test_paddle_hosts import place
from tests.multiprocess.test_paddle_sharded_optimizer import make_parameters, same_bits, train


class Coupled(optim.SGD):
    """An optimizer whose rate depends on all gradients."""

    def step(self) -> None:
        pairs = [(p, p.grad) for p in self._parameter_list if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for _, gradient in pairs)
        for parameter, gradient in pairs:
            paddle.assign(parameter - gradient / (1 + norm), parameter)


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, paddle.Tensor):
            assert value.name == name and value.dtype == other[name].dtype
            assert same_bits(value, other[name]), name
        elif name == "master_weights":
            assert value.keys() == other[name].keys()
            assert all(same_bits(each, other[name][key]) for key, each in value.items())
        else:
            assert value == other[name], name


@kept_ranks(3)
def test_a_state_equals_the_whole_optimizers_and_loads_in_both_directions(group: Any, tmp_path: Path) -> None:
    for optimizer_class, options, dtype in (
        (optim.AdamW, {"amsgrad": True}, "float32"),
        (optim.Lamb, {}, "float32"),
        (optim.SGD, {"multi_precision": True}, "bfloat16"),
    ):

        def make(dtype: str = dtype) -> tuple[list[paddle.Tensor], dict[str, Any]]:
            schedule = optim.lr.ExponentialDecay(0.01, 0.9)
            return make_parameters(dtype), {"learning_rate": schedule, **options}  # noqa: B023

        expected, arguments = make()
        with unique_name.guard():
            whole = optimizer_class(parameters=expected, **arguments)
            train(whole, expected, 5)
        arguments["learning_rate"].step()
        saved = copy.deepcopy(whole.state_dict())
        values = [parameter.clone() for parameter in expected]

        parameters, arguments = make()
        ours = ShardedOptimizer(parameters, optimizer_class, group, **arguments)
        with pytest.raises(ConfigError, match=r"has not been consolidated on rank \d"):
            ours.state_dict()
        train(ours, parameters, 5)
        arguments["learning_rate"].step()
        ours.consolidate_state_dict(to=1)
        if group.rank == 1:
            assert_same_state(ours.state_dict(), saved)
            paddle.save(ours.state_dict(), str(tmp_path / "sharded"))
        group.barrier()
        train(whole, expected, 3)
        loaded = paddle.load(str(tmp_path / "sharded"))

        # Load it into a new optimizer, into one that has made steps, and into an unsharded one.
        for kind in ("new", "used", "unsharded"):
            again, arguments = make()
            with unique_name.guard():
                if kind == "unsharded":
                    optimizer = optimizer_class(parameters=again, **arguments)
                else:
                    optimizer = ShardedOptimizer(again, optimizer_class, group, **arguments)
                if kind == "used":
                    train(optimizer, again, 2)
                with paddle.no_grad():
                    for parameter, value in zip(again, values, strict=True):
                        paddle.assign(value, parameter)
                optimizer.set_state_dict(copy.deepcopy(loaded))
                train(optimizer, again, 3)
            assert all(map(same_bits, again, expected)), (optimizer_class, kind)


def make(group: Any, **options: Any) -> tuple[list[paddle.Tensor], ShardedOptimizer]:
    with unique_name.guard():
        parameters = [paddle.create_parameter([size], "float32") for size in (700, 600)]
    for parameter in parameters:
        parameter.set_value(np.ones(parameter.shape, np.float32))
        parameter.grad = paddle.ones_like(parameter)
    return parameters, ShardedOptimizer(parameters, optim.SGD, group, **{"learning_rate": 0.5, **options})


@kept_ranks(3)
def test_different_steps_are_reported_before_anything_is_written(group: Any) -> None:
    parameters, optimizer = make(group)
    before = [parameter.clone() for parameter in parameters]
    rank = group.rank

    optimizer.set_lr(0.25 if rank == 1 else 0.5)
    with pytest.raises(MismatchError) as caught:
        optimizer.step()
    assert "different hyperparameters: learning_rate" in str(caught.value)
    assert "rank 1: learning_rate: 0.25" in str(caught.value)
    optimizer.set_lr(0.5)

    if rank == 2:
        drop_grad(parameters[1])
    with pytest.raises(UnusedParameterError, match=r"create_parameter_1\.w_0") as unused:
        optimizer.step()
    assert unused.value.unused == {parameters[1].name: (2,)}
    parameters[1].grad = paddle.ones([600])

    with pytest.raises(MismatchError, match="the ranks call different methods"):
        if rank == 0:
            optimizer.consolidate_state_dict()
        else:
            optimizer.step()

    if rank == 0:
        optimizer._whole._parameter_list[0].main_grad = paddle.ones([700])
    with pytest.raises(ConfigError, match=r"kept as main_grad"):
        optimizer.step()
    if rank == 0:
        optimizer._whole._parameter_list[0].main_grad = None

    # Nothing was written, and the next step is complete.
    assert all(map(same_bits, parameters, before))
    optimizer.step()
    assert all(bool((parameter == 0.5).all()) for parameter in parameters)


@kept_ranks(2)
def test_what_cannot_be_sharded_is_refused_on_every_rank(group: Any) -> None:
    linear = nn.Linear(30, 20)

    def refused(pattern: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(PacelineError, match=pattern):
            ShardedOptimizer(*arguments, group=group, **options)

    own = linear.parameters()
    refused("needs no closure", own, optim.LBFGS)
    refused("updates every parameter by itself", own, Coupled)
    refused("derived from Paddle's", own, nn.Linear)
    refused("optimizer_class=SGD, and its arguments", own, optim.SGD(parameters=own))
    refused("at least one", [], optim.SGD)
    refused("model.parameters", own[0], optim.SGD)
    refused("the order in a set", [{"params": set(own)}], optim.SGD)
    refused("some name several times", [own[0], own[0]], optim.SGD)
    refused("AdamW refuses its arguments", own, optim.AdamW, rate=0.1)
    refused("AdamW refuses its arguments", own, optim.AdamW, learning_rate=None)
    refused("reduce_through", own, optim.SGD, reduce_through="wire")
    # One rank alone refuses, and the other rank raises too.
    given = own if group.rank else own[:1]
    refused(r"parameters|parameter 1", given, optim.SGD)
    with pytest.raises(ModelMismatchError):
        ShardedOptimizer(own, optim.SGD, group, learning_rate=0.1 + group.rank)

    _, optimizer = make(group)
    for use, words in [
        (lambda: optimizer.apply_gradients([]), "made by all ranks together"),
        (lambda: optimizer.minimize(paddle.ones([]), parameters=own), "parameters"),
        (lambda: optimizer.set_state_dict([]), "a state_dict"),
        (lambda: optimizer.set_state_dict({"other_0.w_0_moment_0": paddle.ones([3])}), "of other parameters"),
        (lambda: copy.deepcopy(optimizer), "cannot be pickled or copied"),
        (lambda: optimizer.consolidate_state_dict(to=2), "to=2"),
    ]:
        with pytest.raises(ConfigError, match=words):
            use()
    for name in ("use_fusion_storage", "_apply_optimize", "no_such_thing"):
        assert not hasattr(optimizer, name)


@kept_ranks(2)
def test_parameters_that_change_are_followed(group: Any) -> None:
    """Other memory, frozen and unfrozen, other options: it behaves like the unsharded optimizer."""
    results = []
    for is_ours in (True, False):
        parameters = make_parameters()
        options = {"learning_rate": 0.1, "weight_decay": 0.1}
        if is_ours:
            optimizer = ShardedOptimizer(parameters, optim.Momentum, group, **options)
        else:
            optimizer = optim.Momentum(parameters=parameters, **options)
        train(optimizer, parameters, 2)
        moved = parameters[0].clone()
        parameters[0].get_tensor()._share_data_with(moved.get_tensor())
        parameters[7].stop_gradient = True
        optimizer._momentum = 0.5
        parameters[2].optimize_attr["learning_rate"] = 0.1
        parameters[4].regularizer = paddle.regularizer.L1Decay(0.2)
        train(optimizer, parameters, 4)
        assert parameters[0].data_ptr() == moved.data_ptr()
        optimizer.clear_grad()
        results.append(parameters)
    assert all(map(same_bits, *results))


@kept_ranks(2)
def test_a_step_is_skipped_if_a_scaler_found_an_infinity(group: Any) -> None:
    """As GradScaler.step() sets it, which Paddle does on GPUs only."""
    parameters, optimizer = make(group)
    for is_found, expected in [(True, 1.0), (False, 0.5)]:
        optimizer._set_auxiliary_var("found_inf", paddle.to_tensor([is_found]))
        optimizer.step()
        assert optimizer._get_auxiliary_var("found_inf") is is_found
        assert all(bool((parameter == expected).all()) for parameter in parameters)


@kept_ranks(1, group=None)
def test_on_one_rank_it_equals_the_optimizer(rank: int) -> None:
    expected, parameters = make_parameters(), make_parameters()
    with unique_name.guard():
        whole = optim.AdamW(parameters=expected)
        train(whole, expected, 3)
    ours = ShardedOptimizer(parameters, optim.AdamW)
    train(ours, parameters, 3)
    assert all(map(same_bits, parameters, expected))
    assert_same_state(ours.state_dict(), whole.state_dict())


@pytest.mark.parametrize("where", ["before", "within"])
@ranks(2, dies={1: signal.SIGKILL})
def test_half_a_step_left_by_a_killed_rank_is_reported(group: Any, where: str) -> None:
    """In the first barrier, nothing is written yet; in the second, the survivor reports half a step."""
    parameters, optimizer = make(group)
    optimizer.step()
    if group.rank == 1:
        arrival = _core.fault_points().index("before_arrive")
        _core.arm_fault(arrival, _core.FAULT_ACTIONS["kill"], 1 if where == "before" else 2)
    before = [parameter.clone() for parameter in parameters]
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
    for use in (optimizer.step, optimizer.consolidate_state_dict):
        with pytest.raises(CollectiveError, match="an earlier step was not completed"):
            use()
    optimizer.set_state_dict({})
    with pytest.raises(PeerLostError):
        optimizer.step()


@kept_ranks(2, group=None)
def test_replica_groups_of_local_sgd_cannot_share_an_optimizer(rank: int) -> None:
    place(rank, (0, 1))
    wrapped = DataParallel(two_layers(), local_sgd=LocalSGD(every=4, warmup_steps=1))
    optimizer = ShardedOptimizer(wrapped.parameters(), optim.SGD, learning_rate=0.1)
    for step in range(2):
        squares(wrapped(share(batch(8, seed=step), rank))).backward()
        if step == 0:
            optimizer.step()  # in the warm-up, all ranks have the same model
            optimizer.clear_grad()
    before = [parameter.clone() for parameter in wrapped.parameters()]
    with pytest.raises(ConfigError, match="do not train the same model"):
        optimizer.step()
    assert all(map(same_bits, wrapped.parameters(), before))
