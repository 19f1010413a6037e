"""Ranks with different numbers of batches, in paceline.paddle's join(), against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

from paceline.errors import SkippedPassError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    CLEARS,
    Words,
    assert_same_on_all_ranks,
    join_paddle,
    joined_ranks,
    kept_ranks,
    paths,
    squares,
    two_layers,
)


def batches(count: int, rank: int) -> list[paddle.Tensor]:
    rng = np.random.default_rng(rank)
    return [paddle.to_tensor(rng.standard_normal((2, 4)).astype(np.float32)) for _ in range(count)]


def sgd(model: nn.Layer) -> None:
    for parameter in model.parameters():
        parameter.set_value(parameter - 0.1 * parameter.grad)


def reference(data: list[list[paddle.Tensor]], divide_by_all: bool) -> nn.Layer:
    """Sum in each step over the ranks with a batch, and divide by their number or by that of all ranks."""
    alone = two_layers()
    alone.to(dtype="float64")
    for step in range(max(map(len, data))):
        active = [rows[step] for rows in data if step < len(rows)]
        alone.clear_gradients()
        for x in active:
            (squares(alone(x.astype("float64"))) / (len(data) if divide_by_all else len(active))).backward()
        sgd(alone)
    return alone


def check(model: nn.Layer, expected: nn.Layer) -> None:
    for ours, right in zip(model.parameters(), expected.parameters(), strict=True):
        assert_allclose(ours.numpy(), right.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@kept_ranks(3)
def test_join_gives_the_mean_over_all_or_over_those_with_data(
    group: Any, divide_by_all: bool, options: dict[str, bool]
) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group, bucket_cap_mb=0.0001, **options)
    # In the first epoch rank 0 has no data; the second is even.
    for counts in ((0, 3, 1), (2, 2, 2), (3, 1, 0)):
        data = [batches(count, rank) for rank, count in enumerate(counts)]
        for parameter, start in zip(model.parameters(), two_layers().parameters(), strict=True):
            parameter.set_value(start)
        with wrapped.join(divide_by_initial_world_size=divide_by_all):
            for x in data[group.rank]:
                wrapped.clear_gradients()
                squares(wrapped(x)).backward()
                sgd(model)
        check(model, reference(data, divide_by_all))
        by_rank = [group.all_gather(p.numpy()) for p in model.parameters()]
        assert all(np.array_equal(rows[0], row) for rows in by_rank for row in rows)
    wrapped.clear_gradients()
    wrapped(paddle.full([1, 4], 1.0 + group.rank)).sum().backward()  # weights are as before join()
    assert_same_on_all_ranks(model, group)
    assert_array_equal(model[2].bias.grad.numpy(), [1, 1])


@joined_ranks(2)
def test_join_over_paddles_process_group(rank: int) -> None:
    join_paddle(rank)
    model = two_layers()
    wrapped = DataParallel(model, reduce_through="group")
    data = [batches(1, 0), batches(4, 1)]
    with wrapped.join():
        for x in data[rank]:
            wrapped.clear_gradients()
            squares(wrapped(x)).backward()
            sgd(model)
    check(model, reference(data, divide_by_all=True))


@kept_ranks(2)
def test_join_keeps_accumulated_gradients(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group)
    x = paddle.ones([1, 4])
    with wrapped.join():
        if group.rank == 0:
            with wrapped.no_sync():
                wrapped(x).sum().backward()
        else:
            wrapped(x).sum().backward()
            assert_array_equal(model[2].bias.grad.numpy(), [0.5, 0.5])
    wrapped(x).sum().backward()
    # Rank 0 adds 1 from no_sync() and 1 from now, rank 1 its 0.5 from join() and 1 from now.
    assert_array_equal(model[2].bias.grad.numpy(), [1.75, 1.75])


@kept_ranks(2)
def test_join_may_throw_on_all_ranks(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group)
    expected = pytest.raises(RuntimeError, match="Rank 0 of 2 exhausted the inputs")
    with expected as caught, wrapped.join(throw_on_early_termination=True):
        for x in batches(1 + 2 * group.rank, group.rank):
            squares(wrapped(x)).backward()
    assert isinstance(caught.value, SkippedPassError) and caught.value.ranks == (0,)
    with wrapped.join(throw_on_early_termination=True):  # with equal numbers of batches
        for x in batches(2, group.rank):
            wrapped.clear_gradients()
            wrapped(x * 0 + 1.0 + group.rank).mean().backward()
    assert_array_equal(model[2].bias.grad.numpy(), [0.5, 0.5])
    with wrapped.join():  # this one does not throw
        for x in batches(1 + group.rank, group.rank):
            squares(wrapped(x)).backward()


@kept_ranks(2)
def test_an_exception_within_join_is_not_the_end_of_data(group: Any) -> None:
    wrapped = DataParallel(two_layers(), group=group)
    with pytest.raises(KeyError), wrapped.join():
        raise KeyError("the loader's")
    with wrapped.join(enable=False):
        wrapped(paddle.ones([1, 4])).sum().backward()


@paths
@joined_ranks(2)
def test_uneven_data_restores_gradients(rank: int, path: str, view: bool) -> None:
    """In loops of backward, step, clear, the first gradient of the next epoch is right."""
    join_paddle(rank)
    for clear in CLEARS.values():
        model = nn.Linear(1, 1, bias_attr=False)
        model.weight.set_value(np.zeros((1, 1), np.float32))
        wrapped = DataParallel(model, reduce_through=path, gradient_as_bucket_view=view)
        optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
        for _ in range(2):  # epochs
            seen = []

            def note(seen: list[float] = seen, model: nn.Layer = model) -> None:
                seen.append(model.weight.grad.item())

            batches = [10.0, 20.0, 30.0][: 1 + 2 * rank]
            for number, value in enumerate(wrapped.iterate(batches, note)):
                wrapped(paddle.full([1, 1], value * (1 + rank))).sum().backward()
                if number == 0:
                    assert model.weight.grad.item() == 15.0
                optimizer.step()
                clear(model)
            assert seen == ([] if rank else [40.0, 60.0])
        wrapped(paddle.full([1, 1], 8.0)).sum().backward()  # as in loops that clear before a backward
        wrapped.finish()
        assert model.weight.grad.item() == 8.0
        if rank == 0:
            wrapped.finish(note)
        else:
            wrapped(paddle.full([1, 1], 5.0)).sum().backward()
            assert model.weight.grad.item() == 13.0
            wrapped.finish()
        if rank == 0:
            assert model.weight.grad.item() == 8.0


@kept_ranks(2)
def test_uneven_data_restores_sparse_gradients(group: Any) -> None:
    model = Words(True)
    wrapped = DataParallel(model, group=group)
    words = paddle.to_tensor([1, 2])
    rows = []
    for _ in range(2):
        wrapped(words).sum().backward()
        rows.append(model.table.weight.grad.get_selected_rows().rows())
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        optimizer.step()
        wrapped.clear_gradients(set_to_zero=False)
        if group.rank == 1:
            wrapped(paddle.to_tensor([3])).sum().backward()
            optimizer.step()
            wrapped.clear_gradients(set_to_zero=False)
        wrapped.finish(optimizer.step)
        assert model.table.weight.grad is None
    assert rows[0] == rows[1]
    wrapped(words).sum().backward()
    wrapped.finish()
    assert model.table.weight.grad.get_selected_rows().rows() == rows[0]
    assert_same_on_all_ranks(model.head, group)


@kept_ranks(2)
def test_without_data_an_optimizer_steps_with_the_means(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=True)
    optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
    for part in wrapped.iterate([1.0, 2.0, 3.0][: 1 + 2 * group.rank], optimizer.step):
        wrapped(paddle.full([1, 4], part)).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    wrapped(paddle.ones([1, 4])).square().sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(model, group)
