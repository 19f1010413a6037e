"""Buffers that the program writes between two steps, which Paddle's class leaves to each rank.

So a step with different values is only a warning here, and not an error as in paceline.torch.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn

from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import batch, join_paddle, joined_ranks, kept_ranks, share, squares

STEPS = 4


class Scaled(nn.Layer):
    """Multiplies by a buffer; forward writes the buffer `own`, and the next forward reads it."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(1)
        self.linear, self.norm = nn.Linear(4, 2), nn.BatchNorm1D(4)
        self.norm.eval()
        self.register_buffer("factor", paddle.ones([1]))
        self.register_buffer("own", paddle.zeros([4]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm(x) - 0.1 * self.own.clone()
        self.own.set_value(0.9 * self.own + x.detach().mean(axis=0))
        return self.linear(x) * self.factor


def put(model: Scaled, value: float) -> None:
    model.factor.set_value(paddle.full([1], value))


def put_another(model: Scaled, value: float) -> None:
    model.factor = paddle.full([1], value)


def put_statistics(model: Scaled, value: float) -> None:
    model.norm._variance.set_value(paddle.full([4], value))


WRITES = [put, put_another, put_statistics]


def gradients(wrapped: nn.Layer, rank: int, write: Any) -> list[np.ndarray]:
    found = []
    for step in range(STEPS):
        write(step)
        wrapped.clear_gradients()
        squares(wrapped(share(batch(), rank))).backward()
        found.append(wrapped.linear.weight.grad.numpy().copy())
    return found


def alone(way: Any, rank: int, first: float = 2.0) -> list[np.ndarray]:
    """Return the gradients of this rank's data, without the mean over the ranks."""
    model, found = Scaled(), []
    for step in range(STEPS):
        way(model, first**step)
        model.own.set_value(paddle.zeros([4]))
        model.clear_gradients()
        squares(model(share(batch(), rank))).backward()
        found.append(model.linear.weight.grad.numpy().copy())
    return found


def reset(wrapped: Any) -> None:
    wrapped._layers.own.set_value(paddle.zeros([4]))


@pytest.mark.parametrize("way", WRITES)
@kept_ranks(2)
def test_the_same_values_on_all_ranks_are_right(group: Any, way: Any) -> None:
    wrapped = DataParallel(Scaled(), group=group)

    def write(step: int) -> None:
        reset(wrapped)
        way(wrapped._layers, 2.0**step)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(wrapped, group.rank, write)
    for got, one, other in zip(found, alone(way, 0), alone(way, 1), strict=True):
        assert_allclose(got, (one + other) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WRITES)
@kept_ranks(2)
def test_other_values_are_reported_once_on_all_ranks(group: Any, way: Any) -> None:
    wrapped = DataParallel(Scaled(), group=group)

    def write(step: int) -> None:
        reset(wrapped)
        way(wrapped._layers, 2.0**step if group.rank == 0 else 3.0**step)

    name = "norm._variance" if way is put_statistics else "factor"
    with pytest.warns(RuntimeWarning, match=f"Buffer '{name}' was written") as caught:
        found = gradients(wrapped, group.rank, write)
    assert len(caught) == 1
    for got, one, other in zip(found, alone(way, 0), alone(way, 1, 3.0), strict=True):
        assert_allclose(got, (one + other) / 2, rtol=1e-4, atol=1e-5)  # as under Paddle's class


@pytest.mark.parametrize("way", WRITES)
@kept_ranks(2)
def test_rank_0s_values_are_broadcast_in_forward_on_request(group: Any, way: Any) -> None:
    wrapped = DataParallel(Scaled(), group=group, forward_sync_buffers=True)

    def write(step: int) -> None:
        reset(wrapped)
        way(wrapped._layers, 2.0**step if group.rank == 0 else 3.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradients(wrapped, group.rank, write)
    for got, one, other in zip(found, alone(way, 0), alone(way, 1), strict=True):
        assert_allclose(got, (one + other) / 2, rtol=1e-4, atol=1e-5)


@kept_ranks(2)
def test_the_flag_between_forward_and_backward(group: Any) -> None:
    wrapped = DataParallel(Scaled(), group=group, broadcast_buffers=False)
    parts = [share(batch(), group.rank)[i : i + 1] for i in range(2)]
    for _ in range(2):
        wrapped.clear_gradients()
        for index, x in enumerate(parts):
            loss = squares(wrapped(x))
            wrapped.grad_need_sync = index == 1
            loss.backward()
    by_rank = group.all_gather(wrapped.linear.weight.grad.numpy())
    assert np.array_equal(by_rank[0], by_rank[1])
    assert wrapped.num_good_passes == 2


@kept_ranks(2)
def test_equal_values_that_one_rank_sets_before_the_first_step(group: Any) -> None:
    """Also if the first forward writes the buffer, which then has other values when the ranks compare."""
    wrapped = DataParallel(Scaled(), group=group)
    if group.rank == 0:
        for buffer in wrapped._layers.buffers():
            before = buffer.numpy().copy()
            buffer.set_value(paddle.to_tensor(before + 1))
            buffer.set_value(paddle.to_tensor(before))
        put_another(wrapped._layers, 1.0)
        wrapped._layers.own = paddle.zeros([4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(wrapped(share(batch(), group.rank))).backward()


@kept_ranks(2)
def test_estimates_of_a_spectral_norm_that_one_rank_advances(group: Any) -> None:
    paddle.seed(1)
    linear = nn.utils.spectral_norm(nn.Linear(4, 4))
    wrapped = DataParallel(nn.Sequential(linear, nn.Linear(4, 2)), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            if group.rank == 0:
                linear(paddle.to_tensor(batch()))
            squares(wrapped(share(batch(), group.rank))).backward()


@pytest.mark.parametrize("path", ["memory", "group"])
@pytest.mark.parametrize("end", ["finish", "join"])
@joined_ranks(2)
def test_the_final_model_of_uneven_data_does_not_count_as_a_write(rank: int, end: str, path: str) -> None:
    """A copy may count as a write, and the evaluation writes different values on each rank."""
    join_paddle(rank)
    wrapped = DataParallel(Scaled(), reduce_through=path)
    x = share(batch(), rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wrapped.join() if end == "join" else contextlib.nullcontext():
            for _ in range(2 + rank):
                squares(wrapped(x)).backward()
        if end == "finish":
            wrapped.finish()
        with paddle.no_grad():
            wrapped(x)
        for _ in range(2):
            squares(wrapped(x)).backward()


@pytest.mark.parametrize("is_in_training", [False, True])
@kept_ranks(2)
def test_a_forward_that_writes_over_what_all_ranks_have_written(group: Any, is_in_training: bool) -> None:
    """The forward is an evaluation in training mode, or one of another wrapped model."""
    shared, x = Scaled(), share(batch(), group.rank)
    first = DataParallel(nn.Sequential(shared), group=group)
    second = DataParallel(nn.Sequential(shared), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            shared.own.set_value(paddle.full([4], step + 1.0))
            other = paddle.zeros([])
            if is_in_training:
                other = squares(second(x))
            else:
                with paddle.no_grad():
                    first(x)
            (squares(first(x)) + other).backward()
    if group.rank == 0:
        shared.own.set_value(paddle.full([4], 7.0))
    with paddle.no_grad():
        first(x)
    with pytest.warns(RuntimeWarning, match="own' was written between two steps on rank 0 of 2"):
        squares(first(x)).backward()
