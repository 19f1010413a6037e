"""Which buffers paceline.paddle.DataParallel synchronises, and which it leaves to each rank."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

import paceline.paddle
from paceline.errors import ModelMismatchError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    batch,
    join_paddle,
    joined_ranks,
    kept_ranks,
    share,
    squares,
    two_layers,
)

COO = functools.partial(paddle.sparse.sparse_coo_tensor, [[0, 1], [1, 0]], shape=[2, 2])
CSR = functools.partial(paddle.sparse.sparse_csr_tensor, [0, 1, 2], [1, 0], shape=[2, 2])


class Recurrent(nn.Layer):
    """A recurrent layer, whose buffer has no values on the CPU, and a counter."""

    def __init__(self, kind: type[nn.Layer]) -> None:
        super().__init__()
        paddle.seed(1)
        self.recurrent, self.head = kind(4, 3), nn.Linear(3, 2)
        self.register_buffer("seen", paddle.zeros([1]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.seen = self.seen + x.sum()
        outputs, _ = self.recurrent(x.reshape([-1, 5, 4]))
        return self.head(outputs)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.SimpleRNN])
@joined_ranks(2)
def test_recurrent_layers_train_like_under_paddles_class(rank: int, kind: type[nn.Layer]) -> None:
    join_paddle(rank)
    theirs, x = Recurrent(kind), share(batch(20), rank)
    train(paddle.DataParallel(theirs), x)
    for path in ("memory", "group"):
        model = Recurrent(kind)
        wrapped = DataParallel(model, reduce_through=path)
        train(wrapped, x)
        for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
            assert_allclose(ours.grad.numpy(), expected.grad.numpy(), rtol=1e-5, atol=1e-6)
        expected = Recurrent(kind)
        train(expected, share(batch(20), 0))  # each backward leaves rank 0's buffer
        assert_allclose(model.seen.numpy(), expected.seen.numpy(), rtol=1e-5)
        wrapped.sync_buffers()
        wrapped.check_replicas()
        for part in wrapped.iterate([x] * (1 + rank)):
            squares(wrapped(part)).backward()


def train(model: nn.Layer, x: paddle.Tensor) -> None:
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for step in range(3):
        optimizer.clear_grad()
        squares(model(x + 0.1 * step)).backward()
        optimizer.step()


@kept_ranks(2)
def test_a_recurrent_layer_is_shared_for_inference(group: Any) -> None:
    paddle.seed(1 + group.rank)
    model = paceline.paddle.share(nn.GRU(4, 3), group)
    outputs, _ = model(paddle.ones([2, 5, 4]))
    by_rank = group.all_gather(np.ascontiguousarray(outputs.numpy()))
    assert_array_equal(by_rank[0], by_rank[1])


@kept_ranks(2)
def test_a_buffer_with_no_sync_stays_each_ranks_own(group: Any) -> None:
    model = two_layers()
    for name in ("own", "common"):
        model.register_buffer(name, paddle.full([2], float(group.rank)))
    model.own.no_sync = True
    wrapped = DataParallel(model, group=group)
    squares(wrapped(share(batch(), group.rank))).backward()
    wrapped.sync_buffers()
    wrapped.check_replicas()
    assert_array_equal(model.own.numpy(), [group.rank] * 2)
    assert_array_equal(model.common.numpy(), [0, 0])


@pytest.mark.parametrize("path", ["memory", "group"])
@pytest.mark.parametrize("make", [COO, CSR])
@joined_ranks(2)
def test_a_sparse_buffer_stays_each_ranks_own(rank: int, make: Any, path: str) -> None:
    join_paddle(rank)
    model = two_layers()
    model.register_buffer("adjacent", make([1.0, 2.0 + rank]), persistable=False)
    model.register_buffer("becomes_sparse", paddle.ones([2, 2]), persistable=False)
    wrapped = DataParallel(model, reduce_through=path)
    model.becomes_sparse = make([3.0, 4.0 + rank])
    squares(wrapped(share(batch(), rank))).backward()
    wrapped.sync_buffers()
    wrapped.check_replicas()
    assert_array_equal(model.adjacent.to_dense().numpy(), [[0, 1], [2 + rank, 0]])
    assert_array_equal(model.becomes_sparse.to_dense().numpy(), [[0, 3], [4 + rank, 0]])


@kept_ranks(2)
def test_a_buffer_that_is_sparse_on_one_rank_is_refused_on_all(group: Any) -> None:
    model = two_layers()
    dense = paddle.ones([2, 2])
    model.register_buffer("adjacent", COO([1.0, 2.0]) if group.rank else dense, persistable=False)
    with pytest.raises(ModelMismatchError, match="adjacent"):
        DataParallel(model, group=group)


@kept_ranks(2)
def test_a_buffer_that_is_empty_at_first_is_synchronised(group: Any) -> None:
    model = two_layers()
    model.register_buffer("queue", paddle.zeros([0, 2]))
    wrapped = DataParallel(model, group=group)
    loss = squares(wrapped(share(batch(), group.rank)))
    model.queue = paddle.full([1, 2], 3.0 + group.rank)
    loss.backward()
    assert_array_equal(model.queue.numpy(), [[3, 3]])
