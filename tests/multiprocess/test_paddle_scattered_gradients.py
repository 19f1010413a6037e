"""Paddle, reduce="scatter": each rank gets the shard of the means that its ShardedOptimizer needs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle import optimizer as optim
from paddle.distributed.fleet.utils import recompute
from paddle.utils import unique_name

from paceline.errors import ConfigError, NonFiniteGradientError, PacelineError, UnusedParameterError
from paceline.paddle import DataParallel, LocalSGD, MixedPrecision, ShardedOptimizer, internals
from tests.multiprocess.paddle_models import drop_grad, kept_ranks

Gradients = list[paddle.Tensor]


def same_bits(one: paddle.Tensor, other: paddle.Tensor) -> bool:
    return one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


class ManyKinds(nn.Layer):
    """Tied, frozen, unused, empty and scalar parameters, and one of several segments."""

    def __init__(self) -> None:
        super().__init__()
        drawn = np.random.default_rng(0)

        def parameter(*shape: int) -> paddle.Tensor:
            made = self.create_parameter(list(shape))
            made.set_value(np.asarray(drawn.standard_normal(shape) / 2, "float32"))
            return made

        self.first, self.first_bias = parameter(9, 70), parameter(70)
        self.large = parameter(70, 700)  # 2.99 of the core's segments
        self.last = parameter(700, 70)
        self.tied = nn.Linear(9, 70)
        self.tied.weight = self.first
        self.tied.bias.set_value(np.zeros(70, "float32"))
        self.frozen = parameter(70)
        self.frozen.stop_gradient = True
        self.unused = parameter(5)
        self.empty = self.create_parameter([0, 4])
        self.scalar = parameter()
        self.wide = parameter(70)

    def forward(self, x: paddle.Tensor, uses_all: bool = False) -> paddle.Tensor:
        h = paddle.tanh(x @ self.first + self.first_bias + self.tied(x))
        h = paddle.tanh(h @ self.large) @ self.last * self.wide + self.frozen
        out = (h * self.scalar).square().mean()
        return out + self.unused.sum() if uses_all else out


def loop(
    model: Any, optimizer: Any, rank: int, steps: int, between: Callable[[Any, int], None]
) -> list[float]:
    drawn = np.random.default_rng(rank)
    norms = []
    for step in range(steps):
        for (
            parameter
        ) in model.parameters():  # clear_grad() leaves zeros: with them, AdamW moves unused parameters
            drop_grad(parameter)
        for micro in range(1 + step % 2):
            batch = paddle.to_tensor(drawn.standard_normal((4, 9)).astype("float32"))
            with model.no_sync() if micro < step % 2 else contextlib.nullcontext():
                model(batch, uses_all=step == 2 and rank == 1).backward()
        norms.append(model.grad_norm())
        between(model, step)
        optimizer.step()
    return norms


@kept_ranks(3)
def test_the_bits_are_those_of_whole_gradients(group: Any) -> None:
    def clip(model: Any, step: int) -> None:
        """Clip by the norm that the backward computed, with either kind of gradients."""
        if step % 3 == 1:
            limit, norm = 0.5 * model.grad_norm(), model.grad_norm()
            if model._config.scatters:
                assert float(model.clip_grad_norm_(limit)) == pytest.approx(norm)
                assert float(model.clip_grad_norm_(2 * norm)) == pytest.approx(limit, rel=1e-4)
            else:
                with paddle.no_grad():
                    for parameter in model.parameters():
                        if (gradient := internals.gradient_of(parameter)) is not None:
                            gradient.scale_(limit / (norm + 1e-6))

    cases: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (optim.AdamW, {"learning_rate": 0.01}, {"weight": group.rank + 1.0, "bucket_cap_mb": 0.05}),
        (optim.Lamb, {"learning_rate": 0.01}, {}),  # gets whole parameters
    ]
    for optimizer_class, options, more in cases:

        def make(more: dict[str, Any] = more, **scatters: Any) -> DataParallel:
            with unique_name.guard():
                return DataParallel(ManyKinds(), group=group, find_unused_parameters=True, **more, **scatters)

        replica = make()
        whole = optimizer_class(parameters=replica.parameters(), **options)
        norms = loop(replica, whole, group.rank, 5, clip)
        for shares in (False, True):
            model = make(reduce="scatter", share_parameters=shares)
            optimizer = ShardedOptimizer(model.parameters(), optimizer_class, group, **options)
            assert loop(model, optimizer, group.rank, 5, clip) == norms
            for (name, ours), expected in zip(model.named_parameters(), replica.parameters(), strict=True):
                assert same_bits(ours, expected), (optimizer_class, shares, name)


def small() -> nn.Layer:
    with unique_name.guard():
        paddle.seed(0)
        return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 1))


def scattering(group: Any, model: nn.Layer | None = None, **options: Any) -> tuple[Any, ShardedOptimizer]:
    wrapped = DataParallel(model or small(), group=group, reduce="scatter", **options)
    return wrapped, ShardedOptimizer(wrapped.parameters(), optim.SGD, group, learning_rate=0.1)


def whole(group: Any, model: nn.Layer | None = None, **options: Any) -> tuple[Any, Any]:
    wrapped = DataParallel(model or small(), group=group, **options)
    return wrapped, optim.SGD(parameters=wrapped.parameters(), learning_rate=0.1)


def loss(model: Any, rank: int, step: int = 0) -> Any:
    drawn = np.random.default_rng(10 * step + rank)
    return model(paddle.to_tensor(drawn.standard_normal((4, 9)).astype("float32"))).square().mean()


@kept_ranks(2)
def test_a_sharded_gradient_cannot_be_read_as_a_whole_one(group: Any) -> None:
    """Reading such a gradient raises on every rank, and training continues afterwards."""
    for shares in (False, True):
        _read_in_each_way(group, *scattering(group, share_parameters=shares))


def _read_in_each_way(group: Any, model: Any, optimizer: ShardedOptimizer) -> None:
    expected, theirs = whole(group)
    parameters = list(model.parameters())
    plain = optim.SGD(parameters=parameters, learning_rate=0.1)

    def backward_(step: int) -> None:
        for each, its in ((model, optimizer), (expected, theirs)):
            its.clear_grad()
            loss(each, group.rank, step).backward()

    def step_and_compare() -> None:
        optimizer.step()
        theirs.step()
        assert all(map(same_bits, parameters, expected.parameters()))

    ways: list[Callable[[], Any]] = [
        lambda: parameters[0].grad,
        lambda: parameters[-1].grad_,
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: plain.minimize(paddle.to_tensor(0.0)),
        lambda: model.clip_grad_norm_(1.0, norm_type=1.0),
        plain.step,
    ]
    for step, read in enumerate(ways):
        backward_(step)
        with pytest.raises(ConfigError, match=r"this rank has a part|2-norm|are shared by 2 ranks"):
            read()
        assert model.grad_norm() == expected.grad_norm()
        copied = copy.deepcopy(parameters[0])
        assert copied.grad is None
        assert isinstance(copied, type(paddle.create_parameter([1], "float32")))
        step_and_compare()
    for is_local in (False, True):  # without clear_grad()
        backward_(0)
        context = model.no_sync() if is_local else contextlib.nullcontext()
        with pytest.raises(ConfigError, match="once more"), context:
            loss(model, group.rank).backward()
        optimizer.clear_grad()
        theirs.clear_grad()
    backward_(0)
    with pytest.raises(ConfigError, match="once more"):
        loss(model, group.rank).backward()
    with pytest.raises(ConfigError, match="not there any more"):
        optimizer.step()
    for clear in (model.clear_gradients, lambda: [drop_grad(p) for p in parameters]):
        clear()
        theirs.clear_grad()
        for each in (model, expected):
            loss(each, group.rank).backward()
        step_and_compare()


@kept_ranks(2)
def test_gradients_are_freed_when_they_are_reduced(group: Any) -> None:
    """There is memory for one copy of the gradients: from the second backward on, earlier ones are gone."""
    paddle.seed(0)
    layers = [nn.Linear(first, second) for first, second in pairwise((40, 300, 40, 300, 40))]
    model, optimizer = scattering(group, nn.Sequential(*layers))
    parameters = list(model.parameters())
    found: list[list[bool]] = []

    def look(_: Any) -> None:
        found.append([internals.gradient_of(parameter) is not None for parameter in parameters])

    for step in range(3):
        optimizer.clear_grad()
        found.clear()
        hidden = model(paddle.full([2, 40], 1.0 + group.rank + step))
        if step:
            model.module[0].weight.register_hook(look)  # called for one of a backward's last gradients
        hidden.square().mean().backward()
        optimizer.step()
    assert len(found) >= 1
    assert not any(any(each[2:]) for each in found)


class Branches(nn.Layer):
    """One of its parameters is used only if `uses_all`."""

    def __init__(self) -> None:
        super().__init__()
        self.always = self.create_parameter([300], default_initializer=nn.initializer.Constant(1.0))
        self.sometimes = self.create_parameter([200], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: float, uses_all: bool = True) -> paddle.Tensor:
        return x * (self.always.square().sum() + (self.sometimes.square().sum() if uses_all else 0))


def train_cleared(group: Any, **options: Any) -> Gradients:
    """Train with a parameter that is unused on one rank, or on all."""
    model = DataParallel(Branches(), group=group, find_unused_parameters=True, **options)
    optimizer = ShardedOptimizer(model.parameters(), optim.AdamW, group, learning_rate=0.1)
    for step in range(6):
        for parameter in model.parameters():
            drop_grad(parameter)
        model(0.5 + group.rank, step == 3 or (step < 4 and step % 2 == group.rank)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@kept_ranks(2)
def test_unused_parameters_and_uncleared_gradients(group: Any) -> None:
    """As with whole gradients; what is left of an earlier backward is refused."""
    assert all(map(same_bits, train_cleared(group), train_cleared(group, reduce="scatter")))
    model, optimizer = scattering(group, Branches(), find_unused_parameters=True)
    model(1.0).backward()
    optimizer.step()
    drop_grad(model.module.always)
    with pytest.raises(ConfigError, match="gradient of 'sometimes' once more"):
        model(1.0, uses_all=False).backward()
    with pytest.raises(ConfigError, match="not there any more"):
        optimizer.step()
    model, optimizer = scattering(group, Branches())
    with pytest.raises(UnusedParameterError, match="sometimes"):
        model(1.0, uses_all=group.rank == 0).backward()
    optimizer.clear_grad()
    model(1.0).backward()
    optimizer.step()
    model.check_replicas()


class RecomputedTwice(nn.Layer):
    """In one backward, its layer gets a gradient from each of two recomputations."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(0)
        self.layer = nn.Linear(9, 9)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for _ in range(2):
            x = recompute(self.layer, x, use_reentrant=True)
        return x


@kept_ranks(2)
def test_a_second_gradient_in_one_backward_counts(group: Any) -> None:
    x = paddle.full([2, 9], 1.0 + group.rank)
    x.stop_gradient = False
    results = []
    for make in (whole, scattering):
        with unique_name.guard():
            model, optimizer = make(group, RecomputedTwice())
        for _ in range(3):
            optimizer.clear_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(same_bits, *results))


@kept_ranks(2)
def test_shards_follow_the_optimizers(group: Any) -> None:
    """Optimizers may be made before wrapping, for some of the parameters each, and again."""
    options = {"learning_rate": 0.01}
    expected = DataParallel(small(), group=group)
    theirs = optim.AdamW(parameters=expected.parameters(), **options)

    def step(model: Any, number: int, *optimizers: Any) -> None:
        for each, its in ((model, optimizers), (expected, (theirs,))):
            for optimizer in its:
                optimizer.clear_grad()
            loss(each, group.rank, number).backward()
            for optimizer in its:
                optimizer.step()
        assert all(map(same_bits, model.parameters(), expected.parameters())), number

    module = small()
    before = ShardedOptimizer(module.parameters(), optim.AdamW, group, **options)
    model = DataParallel(module, group=group, reduce="scatter")
    for number in range(2):
        step(model, number, before)
    module.set_state_dict(expected.module.state_dict())
    theirs = optim.AdamW(parameters=expected.parameters(), **options)
    first, *rest = module.parameters()
    parts = [ShardedOptimizer(each, optim.AdamW, group, **options) for each in (rest, [first])]
    for number in range(2, 4):
        step(model, number, *parts)
    model.init_reducer()
    for number in range(4, 6):
        step(model, number, *parts)
    before.clear_grad()
    loss(model, group.rank).backward()
    with pytest.raises(ConfigError, match="another optimizer"):
        before.step()
    model = DataParallel(small(), group=group, reduce="scatter")
    with pytest.raises(ConfigError, match=r"no ShardedOptimizer has some parameters[^?]*0.weight, 0.bias"):
        model(paddle.ones([1, 9]))
    with paddle.no_grad():
        model(paddle.ones([1, 9]))


@kept_ranks(2)
def test_options_that_exclude_it_are_refused_on_every_rank(group: Any) -> None:
    module = small()
    first, *_, last = module.named_parameters()
    for options in (
        {"gradient_as_bucket_view": True},
        {"reduce_through": "group"},
        {"mixed_precision": MixedPrecision(reduce_dtype="float64")},
        {"local_sgd": LocalSGD(every=2)},
        {"delay_all_reduce_named_params": [first], "param_to_hook_all_reduce": last[1]},
    ):
        with pytest.raises(ConfigError, match=r"reduce='scatter'|reduce_through"):
            scattering(group, module, **options)
    with pytest.raises(ConfigError, match="scatter"):
        DataParallel(small(), group=group, reduce="sum")
    with pytest.raises(ConfigError, match=r"dense gradients[^?]*weight"):
        DataParallel(nn.Embedding(5, 3, sparse=True), group=group, reduce="scatter")
    model, optimizer = scattering(group)
    with pytest.raises(ConfigError, match="communication hook"):
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(ConfigError, match="join"), model.join():
        pass
    clipping = ShardedOptimizer(
        model.parameters(), optim.SGD, group, learning_rate=0.1, grad_clip=nn.ClipGradByGlobalNorm(1.0)
    )
    loss(model, group.rank).backward()
    with pytest.raises(ConfigError, match="grad_clip needs whole gradients"):
        clipping.step()
    optimizer.clear_grad()
    other = DataParallel(model.module, group=group)
    with pytest.raises(ConfigError, match="another wrapped model"):
        loss(model, group.rank)
    del other
    with pytest.raises(PacelineError):
        DataParallel(small(), group=group, reduce="scatter" if group.rank else "mean")


@kept_ranks(2)
def test_uneven_data_and_infinities(group: Any) -> None:
    def uneven(**options: Any) -> Gradients:
        model = DataParallel(small(), group=group, **options)
        optimizer = ShardedOptimizer(model.parameters(), optim.AdamW, group, learning_rate=0.01)
        for step in range(2 + 3 * group.rank):
            optimizer.clear_grad()
            loss(model, group.rank, step).backward()
            optimizer.step()
        model.finish(optimizer.step)
        if options:  # the rank's last gradients are not cleared yet
            with pytest.raises(ConfigError, match="once more"):
                loss(model, group.rank).backward()
        optimizer.clear_grad()
        loss(model, group.rank).backward()
        optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(same_bits, uneven(), uneven(reduce="scatter")))
    model, optimizer = scattering(group, nonfinite="raise")
    with pytest.raises(NonFiniteGradientError):
        (loss(model, group.rank) * (float("inf") if group.rank else 1.0)).backward()
    with pytest.raises(ConfigError, match="not there any more"):
        optimizer.step()
    optimizer.clear_grad()
    loss(model, group.rank).backward()
    optimizer.step()
    model.check_replicas()
