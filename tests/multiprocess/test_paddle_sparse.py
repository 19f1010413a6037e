"""Paddle's sparse gradients: the rows of all ranks, weighted and divided."""

from __future__ import annotations

import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn

from paceline.errors import ConfigError, NonFiniteGradientError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    Words,
    assert_same_on_all_ranks,
    keeps_empty_gradients,
    kept_ranks,
    squares,
)


@kept_ranks(2)
def test_sparse_rows_of_an_embedding(group: object) -> None:
    sparse, dense = Words(True), Words(False)
    wrapped = DataParallel(sparse, group=group, find_unused_parameters=True)
    reference = DataParallel(dense, group=group, find_unused_parameters=True)
    optimizers = [paddle.optimizer.SGD(0.5, parameters=model.parameters()) for model in (sparse, dense)]
    for words in ([[1, 3, 1], [3, 4, 5]], [[2, 2], None]):  # in the second step rank 1 looks up none
        mine = None if words[group.rank] is None else paddle.to_tensor(words[group.rank])
        for model, optimizer in zip((wrapped, reference), optimizers):
            squares(model(mine)).backward()
            optimizer.step()
            optimizer.clear_grad()
        assert_allclose(sparse.table.weight.numpy(), dense.table.weight.numpy(), rtol=1e-5, atol=1e-6)
        assert_same_on_all_ranks(sparse, group)


@kept_ranks(2)
def test_a_dense_gradient_of_a_sparse_embedding_raises_on_all_ranks(group: object) -> None:
    model = Words(True)
    wrapped = DataParallel(model, group=group, find_unused_parameters=True)
    table = model.table.weight
    loss = squares(wrapped(paddle.to_tensor([1, 2])))
    with pytest.raises(ConfigError, match=r"(?s)'table.weight'.*rank 1 of 2.*a dense one"):
        (loss + table.sum() if group.rank == 1 else loss).backward()
    wrapped.clear_gradients()
    squares(wrapped(paddle.to_tensor([1, 2]))).backward()


@kept_ranks(2)
def test_sparse_gradients_of_weighted_micro_batches(group: object) -> None:
    """Rank 0 has micro-batches of 1 and 2 words, rank 1 one of 3 and one of weight 0."""
    model, alone = Words(True), Words(False)
    wrapped = DataParallel(model, group=group, nonfinite="ignore")
    words = ([[1], [3, 1]], [[4, 3, 5], [2]])[group.rank]
    for part, is_last in zip(words, (False, True)):
        wrapped.grad_need_sync = is_last
        counts = part != [2]
        with wrapped.weight(len(part) if counts else 0):
            (squares(wrapped(paddle.to_tensor(part))) * (1.0 if counts else float("nan"))).backward()
    squares(alone(paddle.to_tensor([1, 3, 1, 4, 3, 5]))).backward()
    assert_allclose(model.head.weight.grad.numpy(), alone.head.weight.grad.numpy(), rtol=1e-5, atol=1e-6)
    for each in (model, alone):
        paddle.optimizer.SGD(0.5, parameters=each.parameters()).step()
    assert_allclose(model.table.weight.numpy(), alone.table.weight.numpy(), rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(model.head, group)


@kept_ranks(2)
def test_a_sparse_gradient_that_is_not_finite_is_named(group: object) -> None:
    model = nn.Embedding(6, 3, sparse=True)
    wrapped = DataParallel(model, group=group, nonfinite="raise")
    for value in (float("nan"), 1.0):
        wrapped.clear_gradients()
        loss = wrapped(paddle.to_tensor([1])).sum() * (value if group.rank else 1.0)
        if value == 1.0:
            loss.backward()
            assert wrapped.nonfinite() == {}
            continue
        with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2"):
            loss.backward()
        assert wrapped.nonfinite() == {1: ("weight",)}


@keeps_empty_gradients
@kept_ranks(2)
def test_no_rows_on_one_rank_and_no_gradient_on_the_other(group: object) -> None:
    """Adam moves a parameter with a gradient of no rows, but not one without a gradient."""
    model = Words(True)
    wrapped = DataParallel(model, group=group, find_unused_parameters=True)
    output = wrapped(None if group.rank else paddle.to_tensor([], dtype="int64"))
    output.sum().backward()
    assert model.table.weight.grad is not None
    paddle.optimizer.Adam(0.1, parameters=model.parameters()).step()
    assert_same_on_all_ranks(model, group)


@kept_ranks(2)
def test_an_optimizer_can_step_with_a_mean_without_rows(group: object) -> None:
    """Paddle's SGD ends the process if a sparse gradient has no rows."""
    model = Words(True)
    before = model.table.weight.numpy()
    wrapped = DataParallel(model, group=group)
    wrapped(paddle.to_tensor([], dtype="int64")).sum().backward()
    paddle.optimizer.SGD(0.1, parameters=[model.table.weight]).step()
    assert (model.table.weight.numpy() == before).all()


@kept_ranks(2)
def test_a_sparse_embedding_of_16_bits_is_refused(group: object) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table.to(dtype="bfloat16")
    with pytest.raises(ConfigError, match="sparse gradients of 16 bits"):
        DataParallel(table, group=group)
