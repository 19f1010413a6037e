"""Parameters that change after wrapping: another shape or dtype, frozen, unfrozen, or written in forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn
from paddle.quantization import QAT, QuantConfig
from paddle.quantization.quanters import FakeQuanterWithAbsMaxObserver

from paceline.errors import ConfigError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    CLEARS,
    Words,
    batch,
    join_paddle,
    joined_ranks,
    kept_ranks,
    paths,
    share,
    squares,
    two_layers,
)

LATER = {
    "larger": lambda p: setattr(p, "data", paddle.ones([5, *p.shape])),
    "smaller": lambda p: setattr(p, "data", paddle.ones([1, p.shape[1]])),
    "another shape": lambda p: setattr(p, "data", p.detach().reshape([p.shape[1], p.shape[0]])),
    "another dtype": lambda p: setattr(p, "data", p.detach().astype("float64")),
}


class Sum(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = self.create_parameter([3, 2]), self.create_parameter([2])

    def forward(self, uses_weight: bool = True) -> paddle.Tensor:
        return self.bias.sum() + self.weight.sum() if uses_weight else self.bias.sum()


@paths
@pytest.mark.parametrize("how", LATER)
@joined_ranks(2)
def test_a_changed_shape_or_dtype_is_refused_on_every_rank(
    rank: int, path: str, view: bool, how: str
) -> None:
    join_paddle(rank)
    for clear in CLEARS.values():
        model = Sum()
        wrapped = DataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
        for _ in range(2):
            clear(wrapped)
            wrapped().backward()
        weight = model.weight.detach().clone()
        if rank == 1:
            LATER[how](model.weight)
        clear(wrapped)
        expected = (r"cannot be averaged on rank 1 of 2", r"(?s)shape \[3, 2\].*shape \[")[rank]
        with pytest.raises(ConfigError, match=expected) as caught:
            wrapped().backward()
        assert "'weight'" in str(caught.value)
        if paddle.__version__ < "3.3":
            continue  # there, a parameter whose `.data` was set gets no more gradients
        model.weight.data = weight
        CLEARS["none"](wrapped)
        wrapped().backward()
        assert_array_equal(model.weight.grad.numpy(), np.ones((3, 2)))


@paths
@pytest.mark.parametrize("how", LATER)
@joined_ranks(2)
def test_a_changed_shape_or_dtype_of_an_unused_parameter_is_refused_on_every_rank(
    rank: int, path: str, view: bool, how: str
) -> None:
    join_paddle(rank)
    model = Sum()
    wrapped = DataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, find_unused_parameters=True
    )
    wrapped().backward()
    wrapped.clear_gradients(set_to_zero=False)
    if rank == 1:
        LATER[how](model.weight)
    expected = (r"cannot be averaged on rank 1 of 2", r"(?s)shape \[3, 2\].*shape \[")[rank]
    with pytest.raises(ConfigError, match=expected):
        wrapped(rank == 0).backward()


@kept_ranks(2)
def test_an_embedding_of_another_shape_is_refused_on_every_rank(group: Any) -> None:
    """Its rows would lie beyond the end of the other rank's embedding."""
    model = Words(True)
    wrapped = DataParallel(model, group=group)
    if group.rank == 1:
        model.table.weight.data = paddle.ones([9, 3])
    with pytest.raises(ConfigError, match=r"(?s)'table.weight'.*\[6, 3\] on rank 0, \[9, 3\] on rank 1"):
        wrapped(paddle.to_tensor([5 + 3 * group.rank])).sum().backward()


def quantized() -> nn.Layer:
    """Two layers for quantization-aware training, whose observers keep statistics in frozen parameters."""
    quanter = FakeQuanterWithAbsMaxObserver(moving_rate=0.9)
    model = QAT(QuantConfig(activation=quanter, weight=quanter)).quantize(two_layers(), inplace=True)
    model[2].bias.stop_gradient = True
    return model


def scale_of(model: nn.Layer) -> paddle.Tensor:
    return next(p for name, p in model.named_parameters() if name.endswith("_scale"))


def unfreeze(parameter: paddle.Tensor) -> None:
    parameter.detach_()
    parameter.stop_gradient = False


UNFROZEN = {
    "0.weight_quanter._scale": lambda model: unfreeze(scale_of(model)),
    "2.bias": lambda model: unfreeze(model[2].bias),
}


@paths
@joined_ranks(2)
def test_frozen_parameters_that_forward_changes_in_place(rank: int, path: str, view: bool) -> None:
    """Autograd adds them to its graph as results of an in-place operator, although they are frozen."""
    join_paddle(rank)
    x, models = share(batch(), rank), [quantized(), quantized()]
    ours = DataParallel(models[0], reduce_through=path, gradient_as_bucket_view=view)
    for wrapped in (ours, paddle.DataParallel(models[1])):
        trained = [p for p in wrapped.parameters() if not p.stop_gradient]
        optimizer = paddle.optimizer.SGD(0.1, parameters=trained)
        for _ in range(3):
            squares(wrapped(x)).backward()
            optimizer.step()
            optimizer.clear_grad()
    for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    scale = scale_of(models[0])
    assert not scale.stop_gradient and not scale.is_leaf  # otherwise this tests nothing
    ours.init_reducer()
    squares(ours(x)).backward()
    again = DataParallel(models[0], reduce_through=path)
    squares(again(x)).backward()
    assert scale.grad is None
    models[0].added = nn.Linear(1, 1)
    for wrapped in (ours, again):
        with pytest.raises(ConfigError, match=r"added: added\.weight"):
            wrapped(x)


@pytest.mark.parametrize("name", UNFROZEN)
@kept_ranks(2)
def test_a_parameter_unfrozen_beside_them_is_refused(group: Any, name: str) -> None:
    model, x = quantized(), share(batch(), group.rank)
    wrapped = DataParallel(model, group=group)
    for _ in range(2):
        squares(wrapped(x)).backward()
    UNFROZEN[name](model)
    with pytest.raises(ConfigError, match=f"(?m)unfrozen: {name}$"):
        wrapped(x)


def freeze_around_forwards(model: nn.Layer, layer: nn.Layer, x: paddle.Tensor) -> list[list[Any]]:
    """Return the gradients after each backward; `model` is wrapped, or has the whole batch."""
    found = []

    def backward(loss: paddle.Tensor) -> None:
        loss.backward()
        found.append([None if p.grad is None else p.grad.numpy() for p in model.parameters()])
        for p in model.parameters():
            p.clear_gradient(set_to_zero=False)

    def freeze(is_frozen: bool) -> None:
        for p in layer.parameters():
            p.stop_gradient = is_frozen

    def forward() -> paddle.Tensor:
        return model(x).square().mean()

    freeze(True)
    backward(forward())
    unused = forward()
    freeze(False)
    backward(forward())
    trained = forward()
    freeze(True)
    del unused
    backward(trained)
    frozen = forward()
    freeze(False)
    backward(frozen)
    trained = forward()
    freeze(True)
    frozen = forward()
    freeze(False)
    backward(trained + frozen)
    backward(forward())
    return found


@paths
@pytest.mark.parametrize("find_unused", [False, True])
@joined_ranks(2)
def test_layers_frozen_between_a_forward_and_a_backward(
    rank: int, path: str, view: bool, find_unused: bool
) -> None:
    join_paddle(rank)
    x = batch(4)
    model = two_layers()
    wrapped = DataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, find_unused_parameters=find_unused
    )
    ours = freeze_around_forwards(wrapped, model[0], share(x, rank))
    alone = two_layers()
    theirs = freeze_around_forwards(alone, alone[0], paddle.to_tensor(x))
    assert len(ours) == len(theirs) == 6
    for found, expected in zip(ours, theirs):
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@paths
@pytest.mark.parametrize("find_unused", [False, True])
@joined_ranks(2)
def test_the_grad_of_a_frozen_parameter_stays_while_a_rank_has_no_data(
    rank: int, path: str, view: bool, find_unused: bool
) -> None:
    join_paddle(rank)
    model = two_layers()
    wrapped = DataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, find_unused_parameters=find_unused
    )
    wrapped(paddle.ones([1, 4])).sum().backward()
    before = model[0].weight.grad.numpy()
    for p in model[0].parameters():
        p.stop_gradient = True
    with wrapped.join(divide_by_initial_world_size=True):
        for _ in range(2 + rank):
            model[2].clear_gradients()
            wrapped(paddle.ones([1, 4])).sum().backward()
            assert_array_equal(model[0].weight.grad.numpy(), before)
    assert_array_equal(model[0].weight.grad.numpy(), before)


class Gated(nn.Layer):
    """Of two layers, rank 0 skips the first and rank 1 the second."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(1)
        self.gates, self.head = nn.LayerList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.Linear(4, 2)

    def forward(self, x: paddle.Tensor, rank: int) -> paddle.Tensor:
        return self.head(paddle.tanh(self.gates[1 - rank](x)))


@paths
@joined_ranks(2)
def test_gradients_of_parameters_frozen_after_their_forward_are_averaged(
    rank: int, path: str, view: bool
) -> None:
    """Paddle still adds to them, on the rank that used them."""
    join_paddle(rank)
    x = batch(4)
    model, alone = Gated(), Gated()
    wrapped = DataParallel(
        model, reduce_through=path, gradient_as_bucket_view=view, find_unused_parameters=True
    )
    for _ in range(2):
        ours = [squares(wrapped(share(x, rank), rank)) for _ in range(3)]
        theirs = [(squares(alone(share(x, 0), 0)) + squares(alone(share(x, 1), 1))) / 2 for _ in range(3)]
        for p in (*model.gates.parameters(), *alone.gates.parameters()):
            p.stop_gradient = True
        for one, other in zip(ours, theirs):
            one.backward()
            other.backward()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-5, atol=1e-7)
        for p in (*model.gates.parameters(), *alone.gates.parameters()):
            p.stop_gradient = False
        for each in (wrapped, alone):
            each.clear_gradients()


@pytest.mark.parametrize("is_alone", [False, True])
@paths
@joined_ranks(2)
def test_no_sync_gradients_of_one_rank_count_after_their_parameter_is_frozen(
    rank: int, path: str, view: bool, is_alone: bool
) -> None:
    """As in the mean of what all ranks have accumulated for it."""
    join_paddle(rank)
    x = batch(4)
    model, ranks_alone = Gated(), [Gated(), Gated()]
    ours = DataParallel(model, reduce_through=path, gradient_as_bucket_view=view, find_unused_parameters=True)

    def micro_batch(each: int, used: nn.Layer) -> None:
        squares(used(share(x, each), each)).backward()

    def average() -> None:
        for pair in zip(*(each.parameters() for each in ranks_alone), strict=True):
            left = [p.grad.numpy() for p in pair if p.grad is not None]
            for p in pair:
                p.grad = paddle.to_tensor(sum(left) / 2)

    micro_batch(rank, ours)
    for each in range(2):
        micro_batch(each, ranks_alone[each])
    average()
    for each in (0,) if is_alone else (0, 1):
        if each == rank:
            with ours.no_sync():
                micro_batch(each, ours)
        micro_batch(each, ranks_alone[each])
    for p in [p for each in (model, *ranks_alone) for p in each.gates.parameters()]:
        p.stop_gradient = True
    for _ in range(2):  # no rank uses them in the second one, so they stay
        micro_batch(rank, ours)
        for each in range(2):
            micro_batch(each, ranks_alone[each])
        average()
        for p, q in zip(model.parameters(), ranks_alone[0].parameters(), strict=True):
            assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-5, atol=1e-7)
