"""Communication hooks for Paddle, in shared memory and over Paddle's process group, and compressing hooks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

import paceline
from paceline.errors import NonFiniteGradientError, PeerLostError
from paceline.paddle import DataParallel
from paceline.paddle.communicator.comm_hook import Future
from paceline.paddle.compression import (
    Bf16Compression,
    EightBitCompression,
    Fp16Compression,
    bf16_hook,
    eight_bit_hook,
    fp16_hook,
)
from paceline.reducer.comm_hooks import HookedCall
from tests.multiprocess.paddle_models import (
    Branches,
    Words,
    assert_same_on_all_ranks,
    batch,
    gradients,
    join_paddle,
    joined_ranks,
    keeps_empty_gradients,
    kept_ranks,
    ranks,
    share,
    squares,
    train,
    two_layers,
)

KINDS = [(Fp16Compression, fp16_hook), (Bf16Compression, bf16_hook), (EightBitCompression, eight_bit_hook)]
# The largest rounding error, relative to a value or to the largest value of its block.
UNITS = {Fp16Compression: 2.0**-11, Bf16Compression: 2.0**-8, EightBitCompression: 1 / 254}
PATHS = pytest.mark.parametrize("path", ["memory", "group"])


def mean(state: Any, bucket: Any) -> Any:
    """Do what happens without a hook."""
    return bucket.all_reduce(bucket.buffer()).then(lambda f: f.value() / bucket.world_size)


def at_once(state: Any, bucket: Any) -> paddle.Tensor:
    return bucket.all_gather(bucket.buffer()).wait().mean(axis=0)


def test_a_failed_future_raises_again():
    """A hook that waits twice gets the error twice, and no bucket counts as averaged."""
    calls = []

    def finish() -> paddle.Tensor:
        calls.append(1)
        raise PeerLostError("Rank 1 of 2 died.")

    failed = Future(finish)
    bucket = HookedCall(failed.then(lambda f: f.value()).wait)
    for wait in (failed.wait, failed.value, bucket.wait, bucket.wait):
        with pytest.raises(PeerLostError, match="Rank 1 of 2 died"):
            wait()
    assert len(calls) == 1


def with_paddles_calls(state: Any, bucket: Any) -> paddle.Tensor:
    total = bucket.buffer().clone()
    dist.all_reduce(total, group=bucket.process_group())
    return total / bucket.world_size


def twice(state: Any, bucket: Any) -> Any:
    """Make a second call when the first one completes."""
    return bucket.all_reduce(bucket.buffer()).then(
        lambda f: bucket.all_reduce(f.value() / 4.0).wait()  # the sum of two equal halves of the mean
    )


@contextlib.contextmanager
def numpy_group(rank: int) -> Iterator[Any]:
    """A group beside paddle.distributed, with which the test compares ranks."""
    with paceline.init(name="compare") as group:
        yield group


@PATHS
@pytest.mark.parametrize("view", [False, True])
@joined_ranks(2)
def test_a_hook_that_averages_gives_the_same_as_no_hook(rank: int, path: str, view: bool) -> None:
    join_paddle(rank)
    expected = two_layers()
    train(expected, paddle.to_tensor(batch()))
    for hook in (mean, at_once, with_paddles_calls, twice):
        model = two_layers()
        wrapped = DataParallel(
            model, reduce_through=path, gradient_as_bucket_view=view, bucket_cap_mb=0.00001
        )
        wrapped.register_comm_hook(None, hook)
        assert wrapped.gradient_path == "group"
        train(wrapped, share(batch(), rank))
        for ours, right in zip(model.parameters(), expected.parameters(), strict=True):
            assert_allclose(ours.numpy(), right.numpy(), rtol=1e-5, atol=1e-6)
            assert_allclose(ours.grad.numpy(), right.grad.numpy(), rtol=1e-4, atol=1e-6)
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients(model)))
        assert_allclose(wrapped.grad_norm(), norm, rtol=1e-5)


@kept_ranks(2)
def test_weights_unused_and_sparse_parameters_with_a_hook(group: Any) -> None:
    model = nn.Linear(4, 1)
    weighted = DataParallel(model, group=group, weight=3 - 2 * group.rank)
    weighted.register_comm_hook(None, mean)
    weighted(paddle.full([1, 4], 1.0 + 4 * group.rank)).sum().backward()
    assert_allclose(model.weight.grad.numpy(), np.full((4, 1), 2.0), rtol=1e-6)
    fork = Branches()
    wrapped = DataParallel(fork, group=group, find_unused_parameters=True)
    wrapped.register_comm_hook(None, mean)
    wrapped(paddle.ones([1, 3]), "right" if group.rank else "left").sum().backward()
    for layer in (fork.left, fork.right):
        assert_array_equal(layer.weight.grad.numpy(), np.full((3, 2), 0.5))
    words = Words(sparse=True)
    wrapped = DataParallel(words, group=group)
    wrapped.register_comm_hook(None, mean)
    wrapped(paddle.to_tensor([group.rank, 2])).sum().backward()
    assert words.table.weight.grad.is_selected_rows()
    assert_array_equal(words.head.bias.grad.numpy(), [2.0, 2.0])


@kept_ranks(2)
def test_a_hook_stays_after_init_reducer(group: Any) -> None:
    calls: list[int] = []

    def counted(state: Any, bucket: Any) -> Any:
        calls.append(bucket.index())
        return mean(state, bucket)

    model = two_layers()
    wrapped = DataParallel(model, group=group)
    wrapped.register_comm_hook(None, counted)
    wrapped.init_reducer()
    wrapped(paddle.full([1, 4], 1.0 + group.rank)).sum().backward()
    assert calls and model[2].bias.grad.numpy().tolist() == [1, 1]


@ranks(1, group=None)
def test_a_single_process_calls_its_hook(rank: int) -> None:
    os.environ["WORLD_SIZE"] = "1"
    model = nn.Linear(4, 1)
    wrapped = DataParallel(model)
    wrapped.register_comm_hook(None, lambda state, bucket: bucket.buffer() * 2)
    wrapped(paddle.ones([1, 4])).sum().backward()
    assert_array_equal(model.weight.grad.numpy(), np.full((4, 1), 2.0))


@kept_ranks(2)
def test_values_that_are_not_finite_are_named_with_a_hook(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group, nonfinite="raise")
    wrapped.register_comm_hook(None, mean)
    x = paddle.ones([1, 4])
    if group.rank == 1:
        x[0, 0] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="rank 1"):
        wrapped(x).sum().backward()
    model = nn.Linear(4, 1)
    wrapped = DataParallel(model, group=group, nonfinite="raise")
    wrapped.register_comm_hook(None, lambda state, bucket: bucket.buffer() * float("inf"))
    with pytest.raises(NonFiniteGradientError):  # the hook's result: every rank's gradient is finite
        wrapped(paddle.ones([1, 4])).sum().backward()


@ranks(2, dies={1: signal.SIGKILL})
def test_a_lost_rank_is_named_with_a_hook(group: Any) -> None:
    wrapped = DataParallel(two_layers(), group=group)
    wrapped.register_comm_hook(None, mean)
    for step in range(2):
        loss = wrapped(paddle.ones([1, 4])).sum()
        if step and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step:
            with pytest.raises(PeerLostError, match="Rank 1 of 2 died") as caught:
                loss.backward()
            assert caught.value.lost == (1,)
        else:
            loss.backward()


@keeps_empty_gradients
@kept_ranks(2)
def test_an_empty_parameter_with_a_hook(group: Any) -> None:
    class Holds(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = self.create_parameter([3]), paddle.create_parameter([0, 3], "float32")

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return (self.some * x).sum() + self.none.sum()

    model = Holds()
    wrapped = DataParallel(model, group=group)
    wrapped.register_comm_hook(None, mean)
    wrapped(paddle.full([3], 1.0 + group.rank)).backward()
    assert_array_equal(model.some.grad.numpy(), np.full(3, 1.5))


# --- compression ---


class Disordered(nn.Layer):
    """Layers run in another order than they were made, so buckets change after the first backward."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(1)
        self.last, self.middle, self.first = nn.Linear(5, 2), nn.Linear(6, 5), nn.Linear(4, 6)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.last(paddle.tanh(self.middle(paddle.tanh(self.first(x)))))


def precise() -> nn.Layer:
    model = Disordered()
    model.to(dtype="float64")
    return model


def flat(arrays: Any) -> np.ndarray:
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])


def true_mean(step: int, weights: list[float]) -> np.ndarray:
    """Return the mean of all ranks' gradients, in float64 and in one process, without Paceline."""
    total: Any = 0.0
    for rank, weight in enumerate(weights):
        model = precise()
        squares(model(paddle.to_tensor(batch(seed=10 * step + rank)).astype("float64"))).backward()
        total = total + weight * flat(gradients(model))
    return total / sum(weights)


@PATHS
@pytest.mark.parametrize("weights", [[1.0, 1.0], [700.0, 0.5]])
@joined_ranks(2)
def test_received_gradients_and_residuals_add_up_to_the_true_means(
    rank: int, path: str, weights: list[float]
) -> None:
    join_paddle(rank)
    with numpy_group(rank) as group:
        for make, hook in KINDS:
            model, state = Disordered(), make()
            wrapped = DataParallel(model, bucket_cap_mb=0.00001, reduce_through=path, weight=weights[rank])
            wrapped.register_comm_hook(state, hook)
            received: Any = 0.0
            layouts = {wrapped.bucket_layout()}
            true: Any = 0.0
            for step in range(6):
                wrapped.clear_gradients()
                squares(wrapped(paddle.to_tensor(batch(seed=10 * step + rank)))).backward()
                assert_same_on_all_ranks(model, group)
                layouts.add(wrapped.bucket_layout())
                received = received + flat(gradients(model))
                true = true + true_mean(step, weights)
                kept = flat(state.error_of(p).numpy() for p in model.parameters())
                kept *= weights[rank] / sum(weights)
                group.all_reduce(kept)
                assert_allclose(received + kept, true, rtol=2e-6, atol=1e-6)
            assert len(layouts) == 2
            largest = np.abs(true).max()
            assert 0 < np.abs(kept).max() < 2 * largest * UNITS[make]  # not the errors of all six steps


class Scale(nn.Layer):
    """A model without matrix products, which Paddle does not have for bfloat16 on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([4])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.scale * x


@kept_ranks(2)
def test_other_kinds_of_parameters_and_wrong_states(group: Any) -> None:
    for make, hook in KINDS:
        for dtype in ("float64", "bfloat16"):
            model = Scale()
            model.to(dtype=dtype)
            wrapped = DataParallel(model, group=group)
            wrapped.register_comm_hook(make(), hook)
            wrapped(paddle.full([4], 1.0 + group.rank).astype(dtype)).sum().backward()
            found = model.scale.grad.astype("float32").numpy()
            assert_allclose(found, np.full(4, 1.5), rtol=2 * UNITS[make] + 2.0**-8)
    wrapped = DataParallel(two_layers(), group=group)
    wrapped.register_comm_hook(Fp16Compression(), bf16_hook)
    with pytest.raises(TypeError, match="an instance of Bf16Compression"):
        wrapped(paddle.ones([1, 4])).sum().backward()
    with pytest.raises(TypeError, match="needs a bucket of paceline"):
        fp16_hook(Fp16Compression(), None)


@PATHS
@pytest.mark.parametrize("make, hook", KINDS)
@joined_ranks(2)
def test_a_failed_backward_leaves_no_residual(rank: int, path: str, make: Any, hook: Any) -> None:
    """Bad batches in between do not change the bits of the other batches' gradients."""
    join_paddle(rank)
    for policy in ("ignore", "raise"):
        found: list[list[np.ndarray]] = []
        for is_disturbed in (False, True):
            model = nn.Linear(300, 1)
            model.weight.set_value(np.zeros((300, 1), np.float32))
            wrapped = DataParallel(model, reduce_through=path, nonfinite=policy)
            wrapped.register_comm_hook(make(), hook)
            for step in range(4):
                x = np.random.default_rng(10 * step + rank).standard_normal((1, 300)).astype(np.float32)
                if is_disturbed and step in (0, 2):
                    bad = x * np.float32(1e4)
                    bad[0, 7] = np.inf if rank else bad[0, 7]
                    wrapped.clear_gradients()
                    with contextlib.suppress(NonFiniteGradientError):
                        wrapped(paddle.to_tensor(bad)).sum().backward()
                wrapped.clear_gradients()
                wrapped(paddle.to_tensor(x)).sum().backward()
                found.append(gradients(model))
        for plain, spoilt in zip(found[:4], found[4:], strict=True):
            for expected, got in zip(plain, spoilt, strict=True):
                assert_array_equal(got, expected)


@PATHS
@pytest.mark.parametrize("make, hook", KINDS)
@joined_ranks(2)
def test_residuals_of_unused_parameters_are_kept(rank: int, path: str, make: Any, hook: Any) -> None:
    join_paddle(rank)
    fork = Branches()
    wrapped = DataParallel(fork, reduce_through=path, find_unused_parameters=True)
    wrapped.register_comm_hook(make(), hook)
    x = np.full((1, 3), 1 / 3, np.float32)
    x[0, 0] = 100.0
    arrived, count = np.zeros((3, 2)), 30
    for step in range(2 * count):
        wrapped.clear_gradients()
        wrapped(paddle.to_tensor(x), "right" if step % 2 else "left").sum().backward()
        if step % 2 == 0:
            arrived += fork.left.weight.grad.numpy().astype(np.float64)
    expected = count * np.repeat(x.reshape(3, 1), 2, axis=1).astype(np.float64)
    assert_allclose(arrived, expected, rtol=0, atol=100 * UNITS[make])
