"""Weights with norms and losses that exchange gradients between ranks, against one process in float64."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paceline.errors import ConfigError
from paceline.paddle import DataParallel, ShardedOptimizer, SyncBatchNorm
from tests.multiprocess.paddle_models import join_paddle, joined_ranks, kept_ranks
from tests.several_hosts import be_on_host

SIZES = {2: [1, 4], 3: [1, 4, 2]}
WEIGHTS = {2: [2.5, 0.5], 3: [2.5, 0.5, 7.0]}
Parts = Sequence[np.ndarray[Any, Any]]


def normed() -> nn.Sequential:
    paddle.set_default_dtype("float64")  # for this rank
    paddle.seed(3)
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.BatchNorm1D(4),
        nn.Tanh(),
        nn.Linear(4, 2),
        nn.BatchNorm1D(2, weight_attr=False, bias_attr=False),
    )


def rows(sizes: Sequence[int], seed: int = 5) -> list[np.ndarray[Any, Any]]:
    whole = np.random.default_rng(seed).standard_normal((sum(sizes), 3))
    return np.split(whole, np.cumsum(sizes)[:-1])


def plain_loss(output: paddle.Tensor) -> paddle.Tensor:
    return ((output - 0.3) ** 2).sum() / max(1, output.shape[0]) + (output**3).sum() / 7


def expect(
    alone: nn.Layer, steps: Sequence[tuple[Parts, Sequence[float]]]
) -> list[np.ndarray[Any, Any] | None]:
    """Return the gradients of sum(w * loss) / sum(w) over the ranks' slices of these whole batches."""
    total = sum(sum(weights) for _, weights in steps)
    for parts, weights in steps:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Paddle, about running statistics
            output = alone(paddle.to_tensor(np.concatenate(parts)))
        at = np.cumsum([0, *map(len, parts)]).tolist()
        losses = [
            plain_loss(output[at[i] : at[i + 1]]) * w for i, w in enumerate(weights) if w and len(parts[i])
        ]
        (sum(losses) / total).backward()
    return [None if p.grad is None else p.grad.numpy().copy() for p in alone.parameters()]


def wrap(group: Any, model: nn.Layer, **options: Any) -> DataParallel:
    return DataParallel(SyncBatchNorm.convert_sync_batchnorm(model, group), group=group, **options)


def assert_gradients(model: nn.Layer, expected: Sequence[Any]) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("world_size", [2, 3])
@kept_ranks("world_size")
def test_a_norm_weights_what_it_exchanges(group: Any, world_size: int) -> None:
    parts, weights = rows(SIZES[world_size]), WEIGHTS[world_size]
    expected = expect(normed(), [(parts, weights)])
    own, weight = paddle.to_tensor(parts[group.rank]), weights[group.rank]
    for how in ("argument", "function", "scope", "scope of backward", "once"):
        given = {"argument": weight, "function": lambda _: weight}.get(how)
        model = wrap(group, normed(), weight=given)
        with model.weight(weight) if how == "scope" else contextlib.nullcontext():
            loss = plain_loss(model(own))
            if how == "scope of backward":
                with model.weight(weight):
                    loss.backward()
            else:
                if how == "once":
                    model.weight(weight)
                loss.backward()
        assert_gradients(model, expected)
        if given is None:  # the weight applied to that backward only
            model.clear_gradients()
            plain_loss(model(own)).backward()
            assert_gradients(model, expect(normed(), [(parts, [1.0] * world_size)]))


@pytest.mark.parametrize("form", ["as it is", "deterministic", "sharded", "sharded over the group"])
@joined_ranks(4)
def test_a_norm_weights_what_it_exchanges_between_hosts(rank: int, form: str) -> None:
    be_on_host(rank // 2)
    join_paddle(rank)
    options = {"deterministic": {"deterministic": "world"}, "sharded over the group": GROUP}.get(form, {})
    optimizer = options if form.startswith("sharded") else None
    for step, (parts, weights) in enumerate(cases(4)):
        model = wrap(None, normed(), weight=weights[rank], **options)
        assert model.gradient_path == ("group" if options is GROUP else "hosts")
        assert_trained(model, parts, weights, rank, optimizer, has_micro_batches=step == 1)


@pytest.mark.parametrize("reduce", ["scatter", "all"])
@kept_ranks(3)
def test_a_norm_weights_what_it_exchanges_for_a_sharded_optimizer(group: Any, reduce: str) -> None:
    options = {"reduce": "scatter"} if reduce == "scatter" else {}
    for step, (parts, weights) in enumerate(cases(3)):
        model = wrap(group, normed(), weight=weights[group.rank], **options)
        assert_trained(model, parts, weights, group.rank, {"group": group}, has_micro_batches=step == 1)


GROUP = {"reduce_through": "group"}


def cases(world_size: int) -> list[tuple[Parts, list[float]]]:
    """Return the ranks' slices of a batch, and their weights, for each of two steps."""
    sizes, weights = [1, 4, 2, 3][:world_size], [2.5, 0.5, 7.0, 1.0][:world_size]
    return [(rows(sizes, seed), weights[seed:] + weights[:seed]) for seed in range(2)]


def assert_trained(
    model: DataParallel,
    parts: Parts,
    weights: Sequence[float],
    rank: int,
    options: dict[str, Any] | None,
    *,
    has_micro_batches: bool,
) -> None:
    """Compare gradients with one process, or the step of a ShardedOptimizer with these options."""
    if options is None:
        optimizer: Any = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    else:
        optimizer = ShardedOptimizer(model.parameters(), paddle.optimizer.SGD, learning_rate=0.1, **options)
    steps = [(parts, weights)] * (1 + has_micro_batches)
    before = [parameter.numpy().copy() for parameter in model.parameters()]
    for number in range(len(steps)):
        is_last = number == len(steps) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            plain_loss(model(paddle.to_tensor(parts[rank]))).backward()
    expected = expect(normed(), steps)
    if options is None:
        assert_gradients(model, expected)
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, expected, strict=True):
        if gradient is not None:  # otherwise it is a running statistic
            assert_allclose(parameter.numpy(), old - 0.1 * gradient, rtol=1e-8, atol=1e-10)


class Scaled(nn.Layer):
    """A 16-bit norm behind two parameters."""

    def __init__(self, dtype: str, norm: nn.Layer) -> None:
        super().__init__()
        self.scale = self.create_parameter(
            [3], dtype=dtype, default_initializer=nn.initializer.Constant(0.75)
        )
        self.shift = self.create_parameter([3], dtype=dtype, default_initializer=nn.initializer.Constant(0.5))
        self.dtype = dtype
        self.norm = norm

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x.astype(self.dtype)
        x = x * self.scale + paddle.tanh(x * self.shift)
        return self.norm(x.astype("bfloat16") if self.dtype == "float32" else x).astype(self.dtype)


@kept_ranks(3)
def test_a_norm_of_16_bits_weights_what_it_exchanges(group: Any) -> None:
    """To the precision of bfloat16's 8 bits; without weights, the norm is off by much more."""
    sizes, weights = [8, 24, 16], [2.5, 0.5, 7.0]
    parts = rows(sizes)
    paddle.set_default_dtype("float64")
    expected = expect(Scaled("float64", nn.BatchNorm1D(3)), [(parts, weights)])
    paddle.set_default_dtype("float32")
    model = DataParallel(
        Scaled("float32", SyncBatchNorm(3, process_group=group)), group=group, weight=weights[group.rank]
    )
    plain_loss(model(paddle.to_tensor(parts[group.rank], "float32"))).backward()
    largest = max(np.abs(gradient).max() for gradient in expected if gradient is not None)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient is not None:
            assert_allclose(parameter.grad.numpy(), gradient, rtol=0.05, atol=0.02 * largest)


@pytest.mark.parametrize("world_size", [2, 3])
@kept_ranks("world_size")
def test_micro_batches_and_empty_ones(group: Any, world_size: int) -> None:
    sizes = [SIZES[world_size], SIZES[world_size][::-1], [0, 3, 2][:world_size]]
    steps = [(rows(size, seed), [float(each) for each in size]) for seed, size in enumerate(sizes)]
    model = wrap(group, normed())
    for number, (parts, weights) in enumerate(steps):
        is_last = number == len(steps) - 1
        with contextlib.nullcontext() if is_last else model.no_sync(), model.weight(weights[group.rank]):
            # Paddle's own Linear fails if an empty input needs no gradient.
            own = paddle.to_tensor(parts[group.rank], stop_gradient=False)
            plain_loss(model(own)).backward()
    assert_gradients(model, expect(normed(), steps))


@kept_ranks(2)
def test_a_rank_of_weight_0_has_an_empty_batch_or_every_rank_raises(group: Any) -> None:
    model = wrap(group, normed())
    parts = rows([3, 2])
    own = paddle.to_tensor(parts[group.rank])
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"weigh 0.*\n.*rank 1 of 2"), model.weight(1 - group.rank):
            plain_loss(model(own)).backward()
        model.clear_gradients()
    model.weight(0)  # on every rank: nothing is lost
    plain_loss(model(own)).backward()
    assert all(p.grad is None or not p.grad.numpy().any() for p in model.parameters())
    model.clear_gradients()
    with model.weight(1 + group.rank):
        plain_loss(model(own)).backward()
    assert_gradients(model, expect(normed(), [(parts, [1.0, 2.0])]))


@kept_ranks(2)
def test_a_norm_that_is_recomputed(group: Any) -> None:
    class Recomputed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = normed()

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            hidden = recompute(self.layers[1], self.layers[0](x))
            return recompute(self.layers[4], self.layers[3](self.layers[2](hidden)))

    parts = rows([3, 4])
    expected = expect(normed(), [(parts, [3.0, 1.0])])
    model = wrap(group, Recomputed(), weight=lambda x: 3 - 2 * group.rank)
    plain_loss(model(paddle.to_tensor(parts[group.rank]))).backward()
    assert_gradients(model, expected)


@kept_ranks(2)
def test_a_norm_outside_of_the_wrapper_and_several_models(group: Any) -> None:
    parts, rank = rows([3, 4]), group.rank
    own = paddle.to_tensor(parts[rank])
    expected = expect(normed(), [(parts, [3.0, 1.0])])
    whole = normed()
    inner = wrap(group, whole[:4])
    outer = SyncBatchNorm.convert_sync_batchnorm(whole[4:], group)
    with inner.weight(3 - 2 * rank):
        plain_loss(outer(inner(own))).backward()
    assert_gradients(inner, expected[: len(inner.parameters())])

    whole = normed()
    first, second = wrap(group, whole[:2]), wrap(group, whole[2:])
    with first.weight(3 - 2 * rank), second.weight(3 - 2 * rank):
        plain_loss(second(first(own))).backward()
    assert_gradients(whole, expected)
    first.clear_gradients(), second.clear_gradients()
    first.weight(1 + rank), second.weight(3 - 2 * rank)
    with pytest.raises(ConfigError, match="other weights"):
        plain_loss(second(first(own))).backward()


@kept_ranks(2)
def test_norms_of_a_frozen_model_use_the_weights_of_the_trained_model(group: Any) -> None:
    """As in a generator's step; the discriminator's own step has a batch of other sizes."""
    parts, others = rows([3, 4]), rows([5, 1], seed=6)
    both, alone = normed(), normed()
    expected = expect(both, [(parts, [3.0, 4.0])])[:2]
    expected_second = expect(alone[1:], [([part @ alone[0].weight.numpy() for part in others], [5.0, 1.0])])
    model = normed()
    options = {"weight": lambda x: float(x.shape[0])}
    first, second = wrap(group, model[:1], **options), wrap(group, model[1:], **options)
    trained = [parameter for parameter in second.parameters() if not parameter.stop_gradient]
    for parameter in trained:
        parameter.stop_gradient = True
    plain_loss(second(first(paddle.to_tensor(parts[group.rank])))).backward()
    assert_gradients(first, expected)
    for parameter in trained:
        parameter.stop_gradient = False
    own = others[group.rank] @ model[0].weight.numpy()
    plain_loss(second(paddle.to_tensor(own))).backward()
    assert_gradients(second, expected_second)


@kept_ranks(2)
def test_exchanges_of_user_code_are_refused_with_weights_and_right_without(group: Any) -> None:
    class GatherLayer(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.to_tensor(np.concatenate(group.all_gather(x.numpy())))

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            summed = np.ascontiguousarray(gradient.numpy())
            group.all_reduce(summed)
            return paddle.to_tensor(summed[3 * group.rank :][:3])

    def contrast(output: paddle.Tensor, everything: paddle.Tensor) -> paddle.Tensor:
        return (output.matmul(everything.t()) ** 2).mean()

    parts, rank = rows([3, 3]), group.rank
    own = paddle.to_tensor(parts[rank])
    alone = normed()[:1]
    everything = alone(paddle.to_tensor(np.concatenate(parts)))
    (contrast(everything[:3], everything) * 0.75 + contrast(everything[3:], everything) * 0.25).backward()
    expected = [parameter.grad.numpy() for parameter in alone.parameters()]

    model = wrap(group, normed()[:1])
    with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*rank 0 of 2") as caught:
        model.weight(3 if rank == 0 else 1)  # rank 1 has weight 1 and cannot detect it
        output = model(own)
        contrast(output, GatherLayer.apply(output)).backward()
    assert "multiply the loss" in str(caught.value) and "GatherLayer" in str(caught.value)
    model.clear_gradients()
    output = model(own)
    (contrast(output, GatherLayer.apply(output)) * (1.5 - rank)).backward()
    assert_gradients(model, expected)
    model.clear_gradients()
    with model.weight(2 + rank):  # the next step has no exchange
        plain_loss(model(own)).backward()
    assert_gradients(model, expect(normed()[:1], [(parts, [2.0, 3.0])]))


class Deep(nn.Layer):
    """Many layers; something near the input may exchange gradients.

    Attributes:
        inner: Called near the input, with the activations.
        order: The layers that forward calls.
    """

    def __init__(self) -> None:
        paddle.set_default_dtype("float64")
        paddle.seed(3)
        super().__init__()
        self.layers = nn.LayerList([nn.Linear(3, 3) for _ in range(8)])
        self.order = list(self.layers)
        self.inner: Any = paddle.assign

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for number, layer in enumerate(self.order):
            x = paddle.tanh(layer(x))
            if number == 1:
                x = self.inner(x)
        return x


def summing_gradients(exchange: Any) -> Any:
    """Make a function that exchanges in backward only."""

    class SummedGradient(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.assign(x)

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            return exchange(gradient)

    return SummedGradient.apply


@pytest.mark.parametrize("is_recomputed", [False, True])
@kept_ranks(2)
def test_an_exchange_that_is_switched_on_later_is_refused(group: Any, is_recomputed: bool) -> None:
    def summed(gradient: paddle.Tensor) -> paddle.Tensor:
        array = np.ascontiguousarray(gradient.numpy())
        group.all_reduce(array)
        return paddle.to_tensor(array)

    parts, rank = rows([3, 3]), group.rank
    own = paddle.to_tensor(parts[rank])
    deep = Deep()
    model = DataParallel(deep, group=group, weight=2 + 2 * rank)
    exchange = summing_gradients(summed)
    for _ in range(2):
        plain_loss(model(own)).backward()
        model.clear_gradients()
        deep.inner = exchange
        if is_recomputed:
            deep.inner = lambda x: recompute(lambda x: deep.layers[2](exchange(x)), x)
            deep.order[2] = paddle.assign
        with pytest.raises(ConfigError, match=r"exchanges gradients between ranks.*\n.*all 2 ranks"):
            plain_loss(model(own)).backward()
        model.clear_gradients()
        deep.inner, deep.order[2] = paddle.assign, deep.layers[2]


@kept_ranks(2)
def test_exchanges_are_right_if_the_weights_of_a_micro_batch_are_equal(group: Any) -> None:
    class GatherLayer(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return paddle.to_tensor(np.concatenate(group.all_gather(x.numpy())))

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
            summed = np.ascontiguousarray(gradient.numpy())
            group.all_reduce(summed)
            return paddle.to_tensor(summed[3 * group.rank :][:3])

    def contrast(output: paddle.Tensor, everything: paddle.Tensor) -> paddle.Tensor:
        return (output.matmul(everything.t()) ** 2).mean()

    parts, rank = rows([3, 3]), group.rank
    own, together = paddle.to_tensor(parts[rank]), paddle.to_tensor(np.concatenate(parts))
    several = [(True, [0.1, 0.1]), (False, [2.0, 5.0]), (True, [7.0, 7.0])]
    for micro_batches in ([(True, [3.0, 3.0])], several):
        alone = normed()[:1]
        total = sum(sum(weights) for _, weights in micro_batches)
        model = wrap(group, normed()[:1])
        for number, (is_gathered, weights) in enumerate(micro_batches):
            whole = alone(together)
            losses = [contrast(each, whole if is_gathered else each) for each in (whole[:3], whole[3:])]
            (losses[0] * (weights[0] / total) + losses[1] * (weights[1] / total)).backward()
            is_last = number == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else model.no_sync(), model.weight(weights[rank]):
                output = model(own)
                contrast(output, GatherLayer.apply(output) if is_gathered else output).backward()
        assert_gradients(model, [parameter.grad.numpy() for parameter in alone.parameters()])


@pytest.mark.parametrize("needs", [[True, False], [False, True], [False, False]])
@kept_ranks(2)
def test_inputs_that_need_a_gradient_on_some_ranks_only(group: Any, needs: list[bool]) -> None:
    def model() -> nn.Layer:
        paddle.set_default_dtype("float64")
        paddle.seed(3)
        return nn.Sequential(nn.BatchNorm1D(3), nn.Linear(3, 2))

    parts, rank = rows([3, 4]), group.rank
    expected = expect(model(), [(parts, [1.0, 1.0])])
    wrapped = wrap(group, model())
    own = paddle.to_tensor(parts[rank], stop_gradient=not needs[rank])
    plain_loss(wrapped(own)).backward()
    assert_gradients(wrapped, expected)
    assert (own.grad is not None) == needs[rank]


@kept_ranks(2)
def test_a_rank_without_gradients_is_named_at_once(group: Any) -> None:
    paddle.set_default_dtype("float64")
    norm = SyncBatchNorm(3, process_group=group)
    own = paddle.to_tensor(rows([3, 4])[group.rank], stop_gradient=False)
    with paddle.no_grad() if group.rank else contextlib.nullcontext():
        output = norm(own)
    if group.rank == 0:
        with pytest.raises(ConfigError, match="without any"):
            output.sum().backward()
    group.barrier()
