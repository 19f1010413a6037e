"""From one pass of paceline.paddle to the next: cleared gradients, errors, hooks of users, uneven data."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_array_equal
from paddle import nn

from paceline.errors import ConfigError, PeerLostError, SkippedPassError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    CLEARS,
    Words,
    assert_same_on_all_ranks,
    batch,
    join_paddle,
    ranks,
    two_layers,
)

PATHS = [("memory", False), ("memory", True), ("group", False)]
paths = pytest.mark.parametrize(("path", "view"), PATHS)


class Either(nn.Layer):
    """One of two weights, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias_attr=False), nn.Linear(1, 1, bias_attr=False)

    def forward(self, x: paddle.Tensor, use_a: bool) -> paddle.Tensor:
        return self.a(x) if use_a else self.b(x)


@paths
@ranks(2, group=None)
def test_a_mean_written_into_a_cleared_gradient_is_added_to(rank: int, path: str, view: bool) -> None:
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


class Breaks(paddle.autograd.PyLayer):
    """Its backward raises while `is_broken` holds anything."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, is_broken: list[bool]) -> paddle.Tensor:
        ctx.is_broken = is_broken
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> paddle.Tensor:
        if ctx.is_broken:
            raise ValueError("on purpose")
        return dy


class Fragile(nn.Layer):
    """Its output is one in which nobody finds a tensor, if it hides it."""

    def __init__(self, *, hides: bool = False) -> None:
        super().__init__()
        paddle.seed(1)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self.is_broken: list[bool] = []
        self.hides = hides

    def forward(self, x: paddle.Tensor) -> Any:
        y = self.second(Breaks.apply(self.first(x), self.is_broken))
        return (lambda: y.sum()) if self.hides else y


def total(output: Any) -> paddle.Tensor:
    return output() if callable(output) and not isinstance(output, paddle.Tensor) else output.sum()


@paths
@ranks(2, group=None, deadline_s=90)
def test_a_backward_after_one_that_raised_raises_on_every_rank(rank: int, path: str, view: bool) -> None:
    join_paddle(rank)
    x = paddle.full([1, 4], 1.0 + rank)
    for hides in (False, True):
        model = Fragile(hides=hides)
        wrapped = DataParallel(
            model, reduce_through=path, gradient_as_bucket_view=view, comm_buffer_size=0.0001
        )
        for again in ("backward", "backward after a local one", "forward", "finished"):
            first, second = total(wrapped(x)), total(wrapped(2 * x))
            if rank == 0:
                model.is_broken.append(True)
                with pytest.raises(OSError, match="on purpose"):
                    first.backward()
                model.is_broken.clear()
                if again == "backward after a local one":
                    with wrapped.no_sync():
                        total(model(x)).backward()
            other_calls = {"forward": functools.partial(wrapped, x), "finished": wrapped.finish}
            with pytest.raises(SkippedPassError, match="rank 0 of 2 ended in an exception"):
                other_calls.get(again, second.backward)() if rank == 0 else first.backward()
            del first, second
            for _ in range(2):
                wrapped.clear_gradients()
                total(wrapped(x)).backward()
                assert_array_equal(model.second.bias.grad.numpy(), [1, 1])
                assert_array_equal(model.first.weight.grad[0].numpy(), 1.5 * model.first.bias.grad.numpy())


@ranks(2)
def test_a_weighed_micro_batch_that_raised_leaves_no_weight(group: Any) -> None:
    model = Fragile()
    wrapped = DataParallel(model, group=group)
    x = paddle.full([1, 4], 1.0 + group.rank)
    for _ in range(2):
        with wrapped.no_sync():
            broken, whole = wrapped(x).sum(), wrapped(x).sum()
            model.is_broken.append(True)
            with wrapped.weight(100), pytest.raises(OSError, match="on purpose"):
                broken.backward()
            model.is_broken.clear()
            wrapped.clear_gradients(set_to_zero=False)
            with wrapped.weight(1 + 2 * group.rank):
                whole.backward()
        with wrapped.weight(1 + 2 * group.rank):
            wrapped(3 * x).sum().backward()
        assert_array_equal(model.second.bias.grad.numpy(), [1, 1])
        mean = (1 * 2 * 1 + 3 * 2 * 2) / 4  # of the inputs: each rank's own, weighed by 1 and 3
        ratio = model.first.weight.grad.numpy() / model.first.bias.grad.numpy()
        np.testing.assert_allclose(ratio, np.full_like(ratio, mean), rtol=1e-5)
        wrapped.clear_gradients(set_to_zero=False)


@paths
@ranks(2, group=None, deadline_s=90)
def test_uneven_data_leaves_gradients_as_it_found_them(rank: int, path: str, view: bool) -> None:
    """In the order of most loops: backward, step, clear. The first gradient of the next epoch is right."""
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
        wrapped(paddle.full([1, 1], 8.0)).sum().backward()  # loops that clear before a backward
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


@ranks(2)
def test_uneven_data_leaves_sparse_gradients_as_it_found_them(group: Any) -> None:
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


@ranks(2)
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


Hook = Callable[[paddle.Tensor], Callable[[], None]]


def halve(parameter: paddle.Tensor) -> Callable[[], None]:
    def hook() -> None:
        with paddle.no_grad():
            parameter.grad.scale_(0.5)

    return hook


def replace(parameter: paddle.Tensor) -> Callable[[], None]:
    def hook() -> None:
        parameter.grad = parameter.grad * 0.5

    return hook


def renew(parameter: paddle.Tensor) -> Callable[[], None]:
    def hook() -> None:
        half = parameter.grad * 0.5
        parameter.grad = None
        parameter.grad = half

    return hook


@paths
@pytest.mark.parametrize("hook", [halve, replace, renew])
@ranks(2, group=None, deadline_s=90)
def test_what_a_hook_registered_after_wrapping_leaves_is_averaged(
    rank: int, path: str, view: bool, hook: Hook
) -> None:
    """Of any kind, and from whichever pass on: the same as one that was there before."""
    join_paddle(rank)
    for first in (0, 1, 2):
        model = two_layers()
        wrapped = DataParallel(
            model, reduce_through=path, gradient_as_bucket_view=view, comm_buffer_size=0.00005
        )
        for step in range(4):
            if step == first:
                for parameter in model.parameters():
                    parameter._register_backward_hook(hook(parameter))
            wrapped.clear_gradients()
            x = paddle.full([1, 4], 1.0 + 2 * rank)
            (wrapped(x) * (1 + 2 * rank)).sum().backward()
            factor = 0.5 if step >= first else 1.0
            assert_array_equal(model[2].bias.grad.numpy(), np.full(2, 2 * factor, np.float32))
            assert_same_on_all_ranks(model, SameBits())


class SameBits:
    """Compares over paddle.distributed."""

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        found: list[paddle.Tensor] = []
        paddle.distributed.all_gather(found, paddle.to_tensor(array.reshape(-1)))
        return [each.numpy() for each in found]


@ranks(2)
def test_a_hook_of_the_gradient_before_it_is_accumulated_is_averaged_too(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group)
    for step in range(3):
        if step == 1:
            model[2].bias.register_hook(lambda gradient: gradient.clip(-1, 1))
        wrapped.clear_gradients()
        (wrapped(paddle.ones([1, 4])) * (0.5 + group.rank)).sum().backward()
        assert_array_equal(model[2].bias.grad.numpy(), np.full(2, 0.75 if step else 1.0, np.float32))


LATER = {
    "larger": lambda p: setattr(p, "data", paddle.ones([5, *p.shape])),
    "smaller": lambda p: setattr(p, "data", paddle.ones([1, p.shape[1]])),
    "another shape": lambda p: setattr(p, "data", p.detach().reshape([p.shape[1], p.shape[0]])),
}


class Sum(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = self.create_parameter([3, 2]), self.create_parameter([2])

    def forward(self) -> paddle.Tensor:
        return self.weight.sum() + self.bias.sum()


@paths
@pytest.mark.parametrize("how", LATER)
@ranks(2, group=None, deadline_s=90)
def test_a_value_of_another_shape_is_refused_on_every_rank(
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
        model.weight.data = weight
        CLEARS["none"](wrapped)
        wrapped().backward()
        assert_array_equal(model.weight.grad.numpy(), np.ones((3, 2)))


@ranks(2)
def test_an_embedding_of_another_shape_is_refused_on_every_rank(group: Any) -> None:
    """Its rows would be beyond the end of the other rank's."""
    model = Words(True)
    wrapped = DataParallel(model, group=group)
    if group.rank == 1:
        model.table.weight.data = paddle.ones([9, 3])
    with pytest.raises(ConfigError, match=r"(?s)'table.weight'.*\[6, 3\] on rank 0, \[9, 3\] on rank 1"):
        wrapped(paddle.to_tensor([5 + 3 * group.rank])).sum().backward()


def is_shared(tensor: paddle.Tensor) -> bool:
    """Whether its elements lie in memory that another process may have mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if begin <= tensor.data_ptr() < end:
            return permissions.endswith("s")
    raise AssertionError("its address is mapped nowhere")


@ranks(2, dies={1: signal.SIGKILL})
def test_when_a_rank_is_lost_gradients_leave_the_memory_that_it_can_write_to(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group, gradient_as_bucket_view=True)
    for step in range(3):
        wrapped.clear_gradients()
        output = wrapped(paddle.ones([1, 4])).sum()
        if step < 2:
            output.backward()
        elif group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            assert is_shared(model[2].bias.grad)
            with pytest.raises(PeerLostError):
                output.backward()
    assert not any(is_shared(parameter.grad) for parameter in model.parameters())
    assert_array_equal(model[2].bias.grad.numpy(), [1, 1])


@ranks(2, group=None, deadline_s=90)
def test_two_hapi_models_of_one_network(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """hapi wraps the network by itself, for each stage of a training anew; nothing is dropped."""
    join_paddle(rank)
    monkeypatch.setattr(paddle, "DataParallel", DataParallel)
    network, alone = two_layers(), two_layers()
    reference = paddle.optimizer.SGD(0.1, parameters=alone.parameters())
    stages = []
    for _ in range(2):
        stages.append(paddle.Model(network))
        optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
        stages[-1].prepare(optimizer, nn.MSELoss())
    for step in range(4):
        x, y = batch(seed=step), batch(columns=2, seed=9 + step)
        half = slice(4 * rank, 4 * rank + 4)
        stages[step // 2].train_batch([x[half]], [y[half]])
        nn.functional.mse_loss(alone(paddle.to_tensor(x)), paddle.to_tensor(y)).backward()
        reference.step()
        reference.clear_grad()
    for ours, expected in zip(network.parameters(), alone.parameters(), strict=True):
        np.testing.assert_allclose(ours.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
