"""Local SGD with Paddle: what the front end adds to `paceline.reducer.local_sgd`, against numpy.

test_local_sgd.py tests what is the same for both frameworks: ranks, weights and failures of a sync.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

from paceline.errors import ConfigError, NonFiniteGradientError
from paceline.paddle import DataParallel, LocalSGD
from tests.multiprocess.paddle_models import Words, join_paddle, joined_ranks, kept_ranks, ranks, squares
from tests.several_hosts import be_on_host

LR = 0.1
START = np.array([[0.5, -1.0], [2.0, 0.25]])


class Scaled(nn.Layer):
    """Multiplies its input by a matrix, whose gradient the test computes itself."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.matrix = self.create_parameter([2, 2], dtype=dtype)
        self.matrix.set_value(paddle.to_tensor(START.astype("float32")).astype(dtype))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x @ self.matrix.astype("float32")  # Paddle has no 16-bit product on the CPU


def rows(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal((3, 2)).astype(np.float32)


def train(model: nn.Layer, steps: Sequence[int], rank: int) -> None:
    optimizer = paddle.optimizer.SGD(LR, parameters=model.parameters())
    for step in steps:
        squares(model(paddle.to_tensor(rows(step, rank)))).backward()
        optimizer.step()
        optimizer.clear_grad()


class Simulation:
    """Two replicas, trained and averaged in float64."""

    def __init__(self) -> None:
        self.replicas = [START.copy(), START.copy()]
        self.begun, self.velocity = START.copy(), np.zeros_like(START)

    def step(self, number: int, together: bool = False) -> None:
        found = []
        for rank, matrix in enumerate(self.replicas):
            x = rows(number, rank).astype(np.float64)
            found.append(2 * x.T @ (x @ matrix) / (len(x) * 2))  # the gradient of the mean of squares
        if together:
            found = [sum(found) / 2] * 2
        self.replicas = [matrix - LR * gradient for matrix, gradient in zip(self.replicas, found)]

    def begin(self) -> None:
        self.begun = self.replicas[0].copy()

    def sync(self) -> None:
        moved = self.begun - sum(self.replicas) / 2
        self.velocity = 0.9 * self.velocity + moved
        self.begun = self.begun - 0.7 * (moved + 0.9 * self.velocity)
        self.replicas = [self.begun.copy(), self.begun.copy()]


def check_training(rank: int, between: str) -> None:
    model = Scaled()
    wrapped = DataParallel(model, local_sgd=LocalSGD(2, between=between, warmup_steps=1))
    reference = Simulation()
    for step in range(6):
        if step == 1:
            reference.begin()
        elif step in (3, 5):
            reference.sync()
        train(wrapped, [step], rank)
        reference.step(step, together=step == 0)
        assert_allclose(model.matrix.numpy(), reference.replicas[rank], rtol=1e-4, atol=1e-5)
    wrapped.sync_parameters()
    reference.sync()
    assert_allclose(model.matrix.numpy(), reference.begun, rtol=1e-4, atol=1e-5)
    outer, weights = wrapped.local_sgd_state_dict(), model.matrix.numpy().copy()
    assert outer["steps"] == 6
    train(wrapped, range(6, 9), rank)
    resumed = Scaled()
    again = DataParallel(resumed, local_sgd=LocalSGD(2, between=between, warmup_steps=1))
    resumed.matrix.set_value(weights)
    again.load_local_sgd_state_dict(outer)
    train(again, range(6, 9), rank)
    assert_array_equal(resumed.matrix.numpy(), model.matrix.numpy())
    with pytest.raises(ConfigError, match=r"shape \(1, 2\)"):
        again.load_local_sgd_state_dict(outer | {"parameters": {"matrix": paddle.ones([1, 2])}})


@kept_ranks(2)
def test_ranks_of_one_host_sync(group):
    check_training(group.rank, "ranks")


@joined_ranks(2)
def test_hosts_sync(rank):
    be_on_host(rank)
    join_paddle(rank)
    check_training(rank, "hosts")


@kept_ranks(2)
def test_the_end_of_an_epoch_is_not_a_step_of_the_warm_up(group):
    options, reference = LocalSGD(1, between="ranks", warmup_steps=4), Simulation()
    model = Scaled()
    wrapped = DataParallel(model, local_sgd=options)
    for epoch in range(2):
        for step in wrapped.iterate(range(2 * epoch, 2 * epoch + 2)):
            train(wrapped, [step], group.rank)
            reference.step(step, together=True)
        state, weights = wrapped.local_sgd_state_dict(), model.matrix.numpy().copy()
        assert state["steps"] == 2 * epoch + 2
        model = Scaled()
        wrapped = DataParallel(model, local_sgd=options)
        model.matrix.set_value(weights)
        wrapped.load_local_sgd_state_dict(state)
    assert_allclose(model.matrix.numpy(), reference.replicas[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@kept_ranks(2)
def test_dtypes(group, dtype):
    model = Scaled(dtype)
    wrapped = DataParallel(model, local_sgd=LocalSGD(1, outer_lr=1, outer_momentum=0, between="ranks"))
    squares(wrapped(paddle.to_tensor(rows(0, group.rank)))).backward()
    with paddle.no_grad():
        moved = paddle.to_tensor(START + [0.5, 0.25][group.rank]).astype(dtype)
        paddle.assign(moved, model.matrix)
    wrapped.sync_parameters()
    assert_array_equal(model.matrix.astype("float64").numpy(), START + 0.375)


@kept_ranks(2)
def test_sparse_gradients_uneven_data_and_frozen_parameters(group):
    model = Words(True)
    wrapped = DataParallel(model, local_sgd=LocalSGD(2, between="ranks"), find_unused_parameters=True)
    optimizer = paddle.optimizer.SGD(LR, parameters=model.parameters())
    words = paddle.to_tensor(([1, 3, 1], [3, 4, 5])[group.rank])
    for _ in wrapped.iterate(range(3 + 2 * group.rank)):
        squares(wrapped(words)).backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
    held = group.all_gather(np.concatenate([p.numpy().ravel() for p in model.parameters()]))
    assert_array_equal(held[0], held[1])
    model.head.weight.stop_gradient = True
    before = model.head.weight.numpy().copy()
    squares(wrapped(words)).backward()
    optimizer.step()
    wrapped.sync_parameters()
    assert_array_equal(model.head.weight.numpy(), before)
    model.head.weight.stop_gradient = False
    squares(wrapped(words)).backward()
    optimizer.step()
    model.head.weight.stop_gradient = True  # since the last sync, each rank trained it to other values
    held = group.all_gather(model.head.weight.numpy())
    assert not np.array_equal(held[0], held[1])
    wrapped.sync_parameters()
    held = group.all_gather(model.head.weight.numpy())
    assert_array_equal(held[0], held[1])


@kept_ranks(2)
def test_excluded_calls_are_refused_and_infinities_reported(group):
    wrapped = DataParallel(Scaled(), local_sgd=LocalSGD(2, between="ranks"))
    with pytest.raises(ConfigError, match="communication hook"):
        wrapped.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(ConfigError, match="join"):
        wrapped.join()
    with pytest.raises(ConfigError, match="init_reducer"):
        wrapped.init_reducer()
    train(wrapped, [0], group.rank)
    if group.rank == 1:
        wrapped.module.matrix.set_value(np.full([2, 2], np.inf, np.float32))
    with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2") as caught:
        wrapped.sync_parameters()
    assert caught.value.nonfinite == {1: ("matrix",)}


@ranks(1)
def test_one_rank_steps_with_the_outer_optimizer_too(group):
    model = Scaled()
    wrapped = DataParallel(model, local_sgd=LocalSGD(1, outer_lr=0.5, outer_momentum=0))
    train(wrapped, [0], 0)
    moved = model.matrix.numpy().copy()
    wrapped.sync_parameters()
    assert_allclose(model.matrix.numpy(), (START + moved) / 2, rtol=1e-6)
