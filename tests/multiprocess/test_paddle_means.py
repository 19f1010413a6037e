"""Gradients of paceline.paddle.DataParallel against one process with the whole batch, and Paddle's class."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paceline.errors import ConfigError, SkippedPassError, UnusedParameterError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    CLEARS,
    Branches,
    assert_same_on_all_ranks,
    batch,
    gradients,
    join_paddle,
    joined_ranks,
    kept_ranks,
    paths,
    share,
    squares,
    train,
    two_layers,
)

VIEWS = [False, True]


def close(model: nn.Layer, alone: nn.Layer) -> None:
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
        assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("view", VIEWS)
@kept_ranks(2)
def test_a_parameter_unused_on_one_rank(group: object, view: bool) -> None:
    x = paddle.full([1, 3], 1.0 + group.rank)
    strict = DataParallel(Branches(), group=group, gradient_as_bucket_view=view)
    with pytest.raises(UnusedParameterError, match=r"rank 1: left.weight, left.bias\s+rank 0: right.weight"):
        strict(x, "right" if group.rank else "left").sum().backward()
    model = Branches()
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=view, find_unused_parameters=True)
    for _ in range(3):
        wrapped.clear_gradients(set_to_zero=False)
        wrapped(x, "right" if group.rank else "left").sum().backward()
        assert_array_equal(model.left.weight.grad.numpy(), np.full((3, 2), 0.5))
        assert_array_equal(model.right.weight.grad.numpy(), np.full((3, 2), 1.0))
    wrapped.clear_gradients(set_to_zero=False)
    x.stop_gradient = False
    wrapped(x, "left" if group.rank else "none").sum().backward()  # rank 0 uses nothing at all
    assert_array_equal(model.left.weight.grad.numpy(), np.full((3, 2), 1.0))
    assert model.right.weight.grad is None


@kept_ranks(2)
def test_a_backward_that_raises_is_reported_to_all_and_the_next_is_good(group: object) -> None:
    class Fails(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            if fails:
                raise ValueError("on purpose")
            return dy

    model = two_layers()
    wrapped = DataParallel(model, group=group)
    model[1].register_forward_post_hook(lambda layer, i, out: Fails.apply(out))
    for number in range(3):
        fails = number == 1 and group.rank == 1
        if number == 1:
            caught = OSError if fails else SkippedPassError
            with pytest.raises(caught):
                wrapped(paddle.ones([1, 4])).sum().backward()
            wrapped.clear_gradients()
            continue
        wrapped(paddle.ones([1, 4])).sum().backward()
    assert_same_on_all_ranks(model, group)


@pytest.mark.parametrize("view", VIEWS)
@kept_ranks(2)
def test_gradients_with_other_strides_than_their_parameter(group: object, view: bool) -> None:
    x, factors = batch(), paddle.arange(12, dtype="float32").reshape([4, 3])

    def loss(weight: paddle.Tensor, part: paddle.Tensor) -> paddle.Tensor:
        return ((part @ weight.t()) * factors).sum()

    class Transposed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            paddle.seed(1)
            self.weight = self.create_parameter([3, 4])

        def forward(self, part: paddle.Tensor) -> paddle.Tensor:
            return loss(self.weight, part)

    model, alone = Transposed(), Transposed()
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=view)
    for _ in range(3):
        wrapped(share(x, group.rank)).backward()
        (alone(share(x, 0)) / 2 + alone(share(x, 1)) / 2).backward()
        assert_allclose(model.weight.grad.numpy(), alone.weight.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@kept_ranks(2)
def test_recompute_of_a_layer_that_is_used_twice(group: object, reentrant: bool) -> None:
    def call(model: nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        return model(x)

    class Blocks(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            paddle.seed(1)
            self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.recomputes = True

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = recompute(self.shared, x, use_reentrant=reentrant) if self.recomputes else self.shared(x)
            return self.last(x)

    model, alone, x = Blocks(), Blocks(), batch()
    alone.recomputes = False
    wrapped = DataParallel(model, group=group, comm_buffer_size=0.00005)
    train(wrapped, share(x, group.rank), call=call)
    train(alone, paddle.to_tensor(x))
    close(wrapped, alone)
    assert_same_on_all_ranks(model, group)


@kept_ranks(2)
def test_several_backwards_of_one_forward_and_two_models(group: object) -> None:
    models, alones, x = [two_layers(), two_layers(7)], [two_layers(), two_layers(7)], batch()
    wrapped = [DataParallel(model, group=group) for model in models]

    def losses(pair: list[nn.Layer], part: paddle.Tensor) -> list[paddle.Tensor]:
        first, second = (model(part) for model in pair)
        return [squares(first), first.mean(), squares(first + second)]

    for _ in range(2):
        for loss in losses(wrapped, share(x, group.rank)):
            loss.backward(retain_graph=True)
        for part in (share(x, 0), share(x, 1)):
            for loss in losses(alones, part):
                (loss / 2).backward(retain_graph=True)
        for model, alone in zip(models, alones):
            for ours, expected in zip(gradients(model), gradients(alone), strict=True):
                assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@kept_ranks(2)
def test_gradients_that_cannot_be_averaged_raise_on_all_ranks(group: object) -> None:
    """In the backward in which one rank gets them, with the parameter's name; and the next backward works."""
    for view in VIEWS:
        model = two_layers()
        wrapped = DataParallel(model, group=group, gradient_as_bucket_view=view)
        train(wrapped, paddle.ones([1, 4]), steps=1)
        if group.rank == 1:
            model.to(dtype="float64")
        x = paddle.ones([1, 4], "float64" if group.rank == 1 else "float32")
        wrapped.clear_gradients(set_to_zero=False)
        expected = ("cannot be averaged on rank 1 of 2", "got      a gradient of float64")[group.rank]
        with pytest.raises(ConfigError, match=expected) as caught:
            squares(wrapped(x)).backward()
        assert "'2." in str(caught.value)  # the last layer's gradient is ready first
        model.to(dtype="float32")
        wrapped.clear_gradients(set_to_zero=False)
        train(wrapped, paddle.ones([1, 4]), steps=1)
        assert_same_on_all_ranks(model, group)


@kept_ranks(2)
def test_weighted_micro_batches_with_an_undefined_gradient(group: object) -> None:
    """Paddle leaves the gradient of a batch norm's shift undefined if its scale is frozen."""
    model = nn.Sequential(nn.BatchNorm1D(3), nn.Linear(3, 1))
    model[0].weight.stop_gradient = True
    wrapped = DataParallel(model, group=group, find_unused_parameters=True)
    x = paddle.arange(6, dtype="float32").reshape([2, 3])
    with wrapped.no_sync(), wrapped.weight(1):
        wrapped(x).sum().backward()
    with wrapped.weight(3):
        (5 * wrapped(x).sum()).backward()
    assert model[0].bias.grad is None
    assert_allclose(model[1].bias.grad.numpy(), [2 * (1 * 1 + 3 * 5) / 4], rtol=1e-6)
    assert_same_on_all_ranks(model[1], group)


def step_of(rank: int, wrap: object) -> list[np.ndarray]:
    model = two_layers()
    wrapped = wrap(model)
    train(wrapped, share(batch(), rank))
    return [*gradients(model), *(p.numpy() for p in model.parameters())]


@joined_ranks(2)
def test_gradients_equal_those_of_paddles_class(rank: int) -> None:
    join_paddle(rank)
    ours, theirs = step_of(rank, DataParallel), step_of(rank, paddle.DataParallel)
    for mine, expected in zip(ours, theirs, strict=True):
        assert_allclose(mine, expected, rtol=1e-6, atol=1e-7)


class Either(nn.Layer):
    """Uses one of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias_attr=False), nn.Linear(1, 1, bias_attr=False)

    def forward(self, x: paddle.Tensor, use_a: bool) -> paddle.Tensor:
        return self.a(x) if use_a else self.b(x)


@paths
@joined_ranks(2)
def test_a_mean_in_a_cleared_gradient_accumulates(rank: int, path: str, view: bool) -> None:
    join_paddle(rank)
    one = paddle.ones([1, 1])
    for clear in CLEARS.values():
        model = Either()
        wrapped = DataParallel(
            model, find_unused_parameters=True, reduce_through=path, gradient_as_bucket_view=view
        )
        wrapped(one, True).backward()
        wrapped(one, False).backward()
        clear(wrapped)
        wrapped(one, rank == 0).backward()  # the mean is 1/2
        assert_array_equal(model.a.weight.grad.numpy(), [[0.5]])
        wrapped(one, True).backward()
        assert_array_equal(model.a.weight.grad.numpy(), [[1.5]])


@paths
@joined_ranks(2)
def test_weights_given_while_the_parameters_are_frozen(rank: int, path: str, view: bool) -> None:
    join_paddle(rank)
    model = nn.Sequential(nn.Linear(1, 1, bias_attr=False))
    wrapped = DataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
    (parameter,) = model.parameters()
    parameter.stop_gradient = True
    wrapped.weight(1.0)
    assert parameter.stop_gradient
    wrapped(paddle.ones([1, 1]))
    parameter.stop_gradient = False
    for _ in range(2):
        wrapped.clear_gradients()
        output = wrapped(paddle.full([1, 1], 4.0 * rank))
        wrapped.weight((1.0, 3.0)[rank])
        output.sum().backward()
        assert_array_equal(parameter.grad.numpy(), [[3.0]])
