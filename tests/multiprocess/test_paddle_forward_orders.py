"""Whether a backward is averaged depends on its own forward only, not on other forwards in between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn

from paceline.errors import SkippedPassError
from paceline.paddle import DataParallel
from tests.multiprocess.forward_orders import (
    EPISODES,
    ORDERS,
    SKIPS,
    expected,
    expected_of,
    run,
    run_alone,
)
from tests.multiprocess.paddle_models import join_paddle, joined_ranks


class Scale(nn.Layer):
    """Two weights, so that a backward has more than one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        self.b = self.create_parameter([3], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor, *, raises: bool = False) -> paddle.Tensor:
        if raises:
            raise MemoryError
        return self.a.sum() * x + self.b.sum() * x


@pytest.mark.parametrize("path", ["memory", "group"])
@joined_ranks(2)
def test_a_backward_is_averaged_as_its_forward_asks(rank: int, path: str) -> None:
    join_paddle(rank)
    for order in ORDERS:
        model = DataParallel(Scale(), reduce_through=path)

        def backward(outputs: Sequence[paddle.Tensor]) -> None:
            paddle.stack(list(outputs)).sum().backward()

        run(order, rank, lambda value: model(paddle.to_tensor(value)), backward, model.no_sync)  # noqa: B023
        wanted = expected(order, 2)[rank]
        for parameter in model.parameters():
            assert_allclose(parameter.grad.numpy(), wanted, rtol=1e-6, err_msg=order)


def run_one(model: DataParallel, order: str, rank: int) -> None:
    def fail(value: float) -> None:
        with pytest.raises(MemoryError):
            model(paddle.to_tensor(value), raises=True)

    def backward(outputs: Sequence[paddle.Tensor]) -> None:
        paddle.stack(list(outputs)).sum().backward()

    run_alone(order, rank, lambda value: model(paddle.to_tensor(value)), backward, fail)


@pytest.mark.parametrize("path", ["memory", "group"])
@joined_ranks(2)
def test_ranks_may_make_episodes_of_different_lengths(rank: int, path: str) -> None:
    """They may also leave different outputs out of their loss."""
    join_paddle(rank)
    for orders in EPISODES:
        model = DataParallel(Scale(), reduce_through=path)
        run_one(model, orders[rank], rank)
        for parameter in model.parameters():
            assert_allclose(parameter.grad.numpy(), expected_of(orders), rtol=1e-6, err_msg=str(orders))


@pytest.mark.parametrize("path", ["memory", "group"])
@joined_ranks(2)
def test_a_rank_that_skips_a_backward_is_reported_by_all(rank: int, path: str) -> None:
    join_paddle(rank)
    for orders in SKIPS:
        model = DataParallel(Scale(), reduce_through=path)
        with pytest.raises(SkippedPassError) as caught:
            run_one(model, orders[rank], rank)
        made = [len(order) - 1 for order in orders]
        assert f"rank 0: {made[0]} forward" in str(caught.value)
        assert f"rank 1: {made[1]} forward" in str(caught.value)
        model.clear_gradients()
        run_one(model, "Ff", rank)  # all ranks can continue
        assert_allclose(model._layers.a.grad.numpy(), expected_of(["Ff", "Ff"]), rtol=1e-6)


@joined_ranks(2)
def test_an_extra_backward_on_one_rank_is_reported_by_all(rank: int) -> None:
    join_paddle(rank)
    model = DataParallel(Scale())
    loss = model(paddle.to_tensor(1.0 + rank))
    loss.backward(retain_graph=True)
    with pytest.raises(SkippedPassError, match="Rank 1 of 2 skipped"):
        if rank == 0:
            loss = model(paddle.to_tensor(1.0))
        loss.backward()


class Policy(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(2, 3)

    def forward(self, x: paddle.Tensor, *, is_sampled: bool = False) -> object:
        found = paddle.distribution.Normal(self.logits(x), paddle.ones([3]))
        return found.sample().detach() if is_sampled else found


@pytest.mark.parametrize("way", ["all", "acts first"])
@joined_ranks(2)
def test_episodes_of_a_policy(rank: int, way: str) -> None:
    """The policy's forwards return distributions, and actions that have no backward."""
    join_paddle(rank)
    model = DataParallel(Policy())
    alone = [Policy() for _ in range(2)]
    for each in alone:
        each.set_state_dict(model._layers.state_dict())

    def loss_of(policy: nn.Layer, length: int) -> paddle.Tensor:
        states = paddle.arange(2 * length, dtype="float32").reshape([length, 2])
        if way == "acts first":
            for state in states:
                policy(state, is_sampled=True)
            return policy(states).log_prob(paddle.zeros([length, 3])).sum()
        return paddle.stack([policy(state).log_prob(paddle.zeros([3])) for state in states]).sum()

    for _ in range(2):
        loss_of(model, 2 + 3 * rank).backward()
        for number, each in enumerate(alone):
            loss_of(each, 2 + 3 * number).backward()
    for parameter, *others in zip(model.parameters(), *(each.parameters() for each in alone)):
        wanted = np.mean([each.grad.numpy() for each in others], 0)
        assert_allclose(parameter.grad.numpy(), wanted, rtol=1e-5)
