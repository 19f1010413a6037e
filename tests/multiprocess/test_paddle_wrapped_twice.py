"""Paddle's DataParallel around Paceline's, or the reverse, is refused on every rank, before any gradient."""

from __future__ import annotations

import warnings

import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet

from paceline.errors import ConfigError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import join_paddle, joined_ranks, kept_ranks


@joined_ranks(2)
def test_paddles_wrapper_around_pacelines_and_within(rank: int) -> None:
    join_paddle(rank)
    x = paddle.ones([1, 4])
    ours = DataParallel(nn.Linear(4, 2))
    for outer in (paddle.DataParallel(ours), paddle.DataParallel(nn.Sequential(ours, nn.Linear(2, 1)))):
        with paddle.no_grad():
            outer(x)  # no gradients, so nothing is averaged
        with pytest.raises(ConfigError, match=r"paddle\.DataParallel is around") as caught:
            outer(x)
        assert "averaged twice" in str(caught.value)
    with pytest.raises(ConfigError, match=r"wrapped already, by paddle.*around the whole model"):
        DataParallel(paddle.DataParallel(nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match=r"wrapped already, by paddle.*at '0'"):
        DataParallel(nn.Sequential(paddle.DataParallel(nn.Linear(4, 2))))


@joined_ranks(2)
def test_the_call_that_wrapped_is_named(rank: int) -> None:
    join_paddle(rank)
    x = paddle.ones([1, 4])
    hapi = paddle.Model(DataParallel(nn.Linear(4, 2)))
    hapi.prepare(paddle.optimizer.SGD(parameters=hapi.parameters()), nn.MSELoss())
    with pytest.raises(ConfigError, match=r"paddle\.DataParallel is around") as caught:
        hapi.train_batch([x.numpy()], [x.numpy()[:, :2]])
    assert "paddle.Model (hapi) wraps the model as well" in str(caught.value)
    assert "`paddle.DataParallel = paceline.paddle.DataParallel`" in caught.value.hint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Paddle's process groups
        fleet.init(is_collective=True)
    with pytest.raises(ConfigError, match=r"paddle\.DataParallel is around") as caught:
        fleet.distributed_model(DataParallel(nn.Linear(4, 2)))(x)
    assert "fleet.distributed_model() wraps the model as well" in str(caught.value)
    with pytest.raises(ConfigError, match=r"wrapped already, by paddle") as caught:
        DataParallel(fleet.distributed_model(nn.Linear(4, 2)))
    assert "fleet.distributed_model() has wrapped it" in str(caught.value)
    with pytest.raises(ConfigError, match=r"wrapped already, by paddle") as caught:
        DataParallel(paddle.DataParallel(nn.Linear(4, 2)))
    assert "the line that wraps it" in str(caught.value)


@kept_ranks(2)
def test_paddles_wrapper_that_averages_nothing_is_allowed(group: object) -> None:
    with pytest.warns(UserWarning, match="single-card"):
        ours = DataParallel(paddle.DataParallel(nn.Linear(4, 2)), group=group)
    ours(paddle.ones([1, 4]) * (1 + group.rank)).sum().backward()
    assert ours.module._layers.weight.grad.numpy().tolist() == [[1.5, 1.5]] * 4
