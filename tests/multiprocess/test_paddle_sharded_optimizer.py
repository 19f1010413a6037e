"""paceline.paddle.ShardedOptimizer against Paddle's optimizers that make the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle import optimizer as optim
from paddle.utils import unique_name

from paceline.errors import ConfigError
from paceline.paddle import DataParallel, ShardedOptimizer, internals
from tests.multiprocess.paddle_models import (
    batch,
    drop_grad,
    join_paddle,
    joined_ranks,
    kept_ranks,
    share,
    squares,
    two_layers,
)

Gradients = list[list["np.ndarray | None"]]


class Lion(optim.Optimizer):
    """A third-party optimizer: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023."""

    def __init__(self, learning_rate: float = 0.01, parameters: Any = None) -> None:
        super().__init__(learning_rate, parameters)

    def _create_accumulators(self, block: Any, parameters: Any) -> None:
        for parameter in parameters:
            self._add_accumulator("momentum", parameter)

    def _append_optimize_op(self, block: Any, pair: Any) -> None:
        parameter, gradient = pair
        momentum = self._get_accumulator("momentum", parameter)
        update = (momentum * 0.9 + gradient * 0.1).sign()
        paddle.assign(parameter - update * self.get_lr(), parameter)
        paddle.assign(momentum * 0.99 + gradient * 0.01, momentum)


ELEMENTWISE: list[tuple[type[Any], dict[str, Any]]] = [
    (optim.AdamW, {"learning_rate": 0.01, "weight_decay": 0.1}),
    (optim.Momentum, {"learning_rate": 0.1, "use_nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"learning_rate": 0.1}),
    (optim.Adam, {"learning_rate": 0.01, "amsgrad": True}),
    (optim.Adam, {"learning_rate": 0.01, "use_multi_tensor": True}),
    (optim.Adagrad, {"learning_rate": 0.1, "weight_decay": paddle.regularizer.L1Decay(0.01)}),
    (optim.RMSProp, {"learning_rate": 0.01, "centered": True, "momentum": 0.9}),
    (optim.NAdam, {"learning_rate": 0.01}),
    (optim.RAdam, {"learning_rate": 0.01}),
    (optim.Adamax, {"learning_rate": 0.01}),
    (optim.Adadelta, {"learning_rate": 0.5}),
    (optim.Rprop, {"learning_rate": 0.01}),
    (Lion, {}),
]
WHOLE: list[tuple[type[Any], dict[str, Any]]] = [
    (optim.Lamb, {"learning_rate": 0.01}),
    (optim.ASGD, {"learning_rate": 0.01, "batch_num": 3}),  # keeps three gradients of each element
]


def make_parameters(dtype: str = "float32") -> list[paddle.Tensor]:
    """Return parameters: cut, whole, of one element, empty, frozen; with the same names each time."""
    drawn = np.random.default_rng(0)
    made = []
    with unique_name.guard():
        for shape in ([37, 41], [], [6, 5, 8, 3], [0, 4], [31, 29], [400], [1], [1537]):
            parameter = paddle.create_parameter(shape, "float32")
            parameter.set_value(np.asarray(drawn.standard_normal(shape), "float32"))
            if dtype != "float32":
                internals.convert(parameter, dtype)
            made.append(parameter)
    made[5].stop_gradient = True
    return made


def make_gradients(parameters: Sequence[paddle.Tensor], gap: int, count: int = 7) -> Gradients:
    """Return gradients of several steps; in each step, one of `gap` parameters has none."""
    drawn = np.random.default_rng(1)
    return [
        [
            None
            if parameter.stop_gradient or (index + step) % gap == gap - 1
            else np.asarray(drawn.standard_normal(parameter.shape) * 10.0 ** (step % 4 - 2), "float32")
            for index, parameter in enumerate(parameters)
        ]
        for step in range(count)
    ]


def train(
    optimizer: Any,
    parameters: Sequence[paddle.Tensor],
    steps: int,
    gap: int = 6,
) -> None:
    gradients = make_gradients(parameters, gap)
    for step in range(steps):
        for parameter, values in zip(parameters, gradients[step % len(gradients)], strict=True):
            if values is None:
                drop_grad(parameter)
            else:
                parameter.grad = paddle.to_tensor(values).astype(parameter.dtype)
        optimizer.step()


def same_bits(one: paddle.Tensor, other: paddle.Tensor) -> bool:
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


@kept_ranks(2)
def test_elementwise_optimizers_have_the_bits_of_the_whole_one(group: Any) -> None:
    """After 40 steps; fewer for later optimizers, which take the same code path."""
    for number, (optimizer_class, options) in enumerate(ELEMENTWISE):
        steps = 40 if number < 2 else 16
        gap = 99 if "use_multi_tensor" in options else 6  # multi-tensor needs all gradients in each step
        expected, parameters = make_parameters(), make_parameters()
        train(optimizer_class(parameters=expected, **options), expected, steps, gap)
        before = [parameter.data_ptr() for parameter in parameters]
        ours = ShardedOptimizer(parameters, optimizer_class, group, **options)
        train(ours, parameters, steps, gap)
        for index, (one, other) in enumerate(zip(parameters, expected, strict=True)):
            assert same_bits(one, other), (optimizer_class, options, index)
        assert [parameter.data_ptr() for parameter in parameters] == before
        dealt = {piece.parameter for piece in ours._shards.pieces if not piece.is_whole}
        assert len([index for index in dealt if not parameters[index].stop_gradient]) == 1, "one cut"
        held = sum(each.size for each in ours.optim.state_dict().values() if each.size > 1)
        kinds = held / sum(int(p.size) for p in parameters if not p.stop_gradient)
        assert kinds == pytest.approx(round(2 * kinds) / 2, abs=0.2), "half of the state"


@kept_ranks(3)
def test_other_optimizers_get_whole_parameters_and_have_the_same_bits(group: Any) -> None:
    for optimizer_class, options in WHOLE:
        expected, parameters = ([p for p in make_parameters() if p.size] for _ in range(2))
        train(optimizer_class(parameters=expected, **options), expected, 20)
        ours = ShardedOptimizer(parameters, optimizer_class, group, **options)
        train(ours, parameters, 20)
        assert all(map(same_bits, parameters, expected)), optimizer_class
        assert all(piece.is_whole for piece in ours._shards.pieces)
        assert {piece.rank for piece in ours._shards.pieces} == {0, 1, 2}


@joined_ranks(2)
def test_through_paddles_process_group(rank: int) -> None:
    join_paddle(rank)
    for optimizer_class, options in [*ELEMENTWISE[:1], *WHOLE[:1]]:
        expected, parameters = ([p for p in make_parameters() if p.size] for _ in range(2))
        train(optimizer_class(parameters=expected, **options), expected, 9)
        ours = ShardedOptimizer(parameters, optimizer_class, reduce_through="group", **options)
        train(ours, parameters, 9)
        assert all(map(same_bits, parameters, expected)), optimizer_class
        ours.consolidate_state_dict(to=1)
        if rank == 1:
            assert {each.size for each in ours.state_dict().values()} >= {37 * 41, 1537, 1}


@kept_ranks(2)
def test_other_dtypes(group: Any) -> None:
    for dtype, optimizer_class, options in [
        ("float64", optim.AdamW, {}),
        ("bfloat16", optim.SGD, {"multi_precision": True}),
    ]:
        expected, parameters = make_parameters(dtype), make_parameters(dtype)
        train(optimizer_class(parameters=expected, **options), expected, 9)
        train(ShardedOptimizer(parameters, optimizer_class, group, **options), parameters, 9)
        assert all(map(same_bits, parameters, expected)), dtype


def in_groups(model: nn.Layer) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "weight_decay": 0.5, "learning_rate": 0.1},
        {"params": model[2].parameters(), "grad_clip": nn.ClipGradByGlobalNorm(0.01)},
    ]


def of_weights(name: str) -> bool:
    return "w_" in name


CASES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "norm": (optim.AdamW, {"grad_clip": nn.ClipGradByGlobalNorm(0.05), "apply_decay_param_fun": of_weights}),
    "norms": (optim.AdamW, {"grad_clip": nn.ClipGradByNorm(0.02)}),
    "values": (optim.Adam, {"grad_clip": nn.ClipGradByValue(0.003), "weight_decay": 0.02}),
    "groups": (optim.Momentum, {"grad_clip": nn.ClipGradByGlobalNorm(0.02)}),
}


def run(case: str, how: str, group: Any) -> tuple[list[np.ndarray], list[float]]:
    """Make six steps: "sharded", wrapped and "plain", or in "one process" with the whole batch."""
    with unique_name.guard():
        model = two_layers(width=300)
    model[0].bias.regularizer = paddle.regularizer.L2Decay(0.3)
    parameters = in_groups(model) if case == "groups" else model.parameters()
    optimizer_class, options = CASES[case]
    schedule = optim.lr.StepDecay(0.05, step_size=2)
    options = {**options, "learning_rate": 0.05 if case == "values" else schedule}
    if how == "sharded":
        optimizer = ShardedOptimizer(parameters, optimizer_class, group, **options)
    else:
        optimizer = optimizer_class(parameters=parameters, **options)
    assert isinstance(optimizer, optim.Optimizer)
    called = model if how == "one process" else DataParallel(model, group=group)
    rates = []
    for step in range(6):
        x = batch(8, seed=step)
        squares(called(paddle.to_tensor(x) if called is model else share(x, group.rank))).backward()
        if case == "values" and step == 3:
            optimizer.set_lr(0.02)
        if step % 2 and case != "groups":  # Paddle's minimize() can't find the parameters of groups
            _, pairs = optimizer.minimize(squares(model[2].bias))
            assert len(pairs) == 4
        else:
            optimizer.step()
        optimizer.clear_grad()
        rates.append(optimizer.get_lr())
        schedule.step()
    return [parameter.numpy() for parameter in model.parameters()], rates


@kept_ranks(2)
def test_a_wrapped_model_trains_as_in_one_process(group: Any) -> None:
    """With clips, schedules, groups, regularizers, and functions of names and parameters."""
    for case in CASES:
        (sharded, rates), (plain, plain_rates) = run(case, "sharded", group), run(case, "plain", group)
        alone, alone_rates = run(case, "one process", group)
        assert rates == plain_rates == alone_rates and len(set(rates)) > 1
        for one, other, whole in zip(sharded, plain, alone, strict=True):
            assert np.array_equal(one, other), case
            np.testing.assert_allclose(one, whole, atol=2e-3, err_msg=case)
    assert run("norm", "sharded", group)[0][0].tobytes() != run("norms", "sharded", group)[0][0].tobytes()


@kept_ranks(2)
@pytest.mark.parametrize("shares", [False, True])
def test_an_optimizer_that_makes_no_step_is_refused_when_it_is_made(group: Any, shares: bool) -> None:
    """On every rank, with the optimizer's error; the group and the parameters still work afterwards."""
    model = two_layers().to(dtype="float64")
    wrapped = DataParallel(model, group=group, share_parameters=shares)
    with pytest.raises(ConfigError, match=r"(?s)Adam makes no step.*multi_tensor") as caught:
        ShardedOptimizer(model.parameters(), optim.Adam, group, learning_rate=0.1, use_multi_tensor=True)
    assert "float64" in str(caught.value)
    optimizer = ShardedOptimizer(model.parameters(), optim.Adam, group, learning_rate=0.1)
    before = [parameter.numpy().copy() for parameter in model.parameters()]
    squares(wrapped(share(batch(), group.rank).astype("float64"))).backward()
    optimizer.step()
    assert all(np.any(p.numpy() != was) for p, was in zip(model.parameters(), before, strict=True))
