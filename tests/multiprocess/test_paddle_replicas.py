"""Replicas of a Paddle model that differ for other reasons than gradients."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn

from paceline.errors import ReplicasDifferError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import batch, join_paddle, joined_ranks, kept_ranks, share, squares

ODD = 2  # of 3 ranks


def network() -> nn.Layer:
    paddle.seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1D(6), nn.Linear(6, 2))


def backward(wrapped: DataParallel, rank: int) -> None:
    wrapped.clear_gradients()
    squares(wrapped(share(batch(9), rank, 3))).backward()


@pytest.mark.parametrize("way", ["memory", "group"])
@joined_ranks(3)
def test_a_check_on_demand(rank: int, way: str) -> None:
    join_paddle(rank)
    wrapped = DataParallel(network(), reduce_through=way)
    optimizer = paddle.optimizer.Adam(0.1, parameters=wrapped.parameters())
    backward(wrapped, rank)
    optimizer.step()
    wrapped.check_replicas(optimizer)
    if rank == ODD:
        optimizer.set_lr(0.2)
    wrapped.check_replicas()
    with pytest.raises(
        ReplicasDifferError, match=r"Rank 2 .*1 of \d+ values differ, optimizer 'learning rate' first"
    ):
        wrapped.check_replicas(optimizer)
    if rank == ODD:
        optimizer.set_lr(0.1)
        moments = [value for name, value in optimizer.state_dict().items() if "moment1" in name]
        moments[0].set_value(moments[0] + 1)
        wrapped.module[1]._mean.set_value(wrapped.module[1]._mean + 1)
    with pytest.raises(ReplicasDifferError, match=r"2 of \d+ values.* buffer '1\._mean' first") as caught:
        wrapped.check_replicas(optimizer)
    name = list(caught.value.differing)[1]
    assert name.startswith("0.") and "moment1" in name


@kept_ranks(3)
def test_a_skipped_step_is_reported_in_the_next_backward(group: object) -> None:
    wrapped = DataParallel(network(), group=group)
    optimizer = paddle.optimizer.SGD(0.1, parameters=wrapped.parameters())
    for _ in range(3):
        backward(wrapped, group.rank)
        optimizer.step()
    backward(wrapped, group.rank)
    if group.rank != ODD:
        optimizer.step()
    with pytest.raises(ReplicasDifferError, match=r"Rank 2 of 3 .*parameter '0\.weight'") as caught:
        backward(wrapped, group.rank)
    assert "ranks 0-1: 1; rank 2: 0" in caught.value.seen
