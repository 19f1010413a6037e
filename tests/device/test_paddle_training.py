"""paceline.paddle.DataParallel on a device whose streams are threads, against one process on the CPU."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paceline.errors import ConfigError, NonFiniteGradientError, PeerLostError, SkippedPassError
from paceline.paddle import DataParallel, MixedPrecision, SyncBatchNorm
from tests import paddle_accelerator
from tests.device import LAG_US
from tests.multiprocess.paddle_models import Branches, batch, drop_grad, ranks, share, squares, two_layers
from tests.paddle_accelerator import KIND

pytestmark = paddle_accelerator.needs_two
SMALL = {"comm_buffer_size": 1e-5, "last_comm_buffer_size": 1e-5}


def network() -> nn.Layer:
    """The same on the CPU and on a device, whose random numbers may differ."""
    values = np.random.default_rng(3)
    layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1D(6), nn.Tanh(), nn.Linear(6, 2))
    for parameter in layers.parameters():
        parameter.set_value(values.standard_normal(parameter.shape).astype(np.float32))
    return layers


def on_cpu(layer: nn.Layer) -> nn.Layer:
    """A copy in float64 that another process might train alone."""
    with place("cpu"):
        made = network()
        made.set_state_dict({name: value.cpu() for name, value in layer.state_dict().items()})
        return made.to(dtype="float64")


@contextlib.contextmanager
def place(name: str) -> Iterator[None]:
    """A context in which tensors are made on the CPU."""
    before = paddle.get_device()
    paddle.set_device(name)
    try:
        yield
    finally:
        paddle.set_device(before)


def assert_mean(model: nn.Layer, alone: list[nn.Layer], weights: list[float] | None = None) -> None:
    """Gradients are the mean of those of `alone`, on the device."""
    shares = np.array(weights or [1.0] * len(alone)) / sum(weights or [1.0] * len(alone))
    for ours, *each in zip(model.parameters(), *(layer.parameters() for layer in alone), strict=True):
        if ours.stop_gradient:
            continue
        assert not ours.grad.place.is_cpu_place()
        mean = sum(share * p.grad.numpy() for share, p in zip(shares, each, strict=True))
        assert_allclose(ours.grad.numpy(), mean, rtol=1e-4, atol=1e-5)


def backward_alone(alone: list[nn.Layer], x: np.ndarray) -> None:
    with place("cpu"):
        for layer, part in zip(alone, np.split(x, len(alone)), strict=True):
            squares(layer(paddle.to_tensor(part, dtype="float64"))).backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "many buckets": SMALL,
    "views": {**SMALL, "gradient_as_bucket_view": True},
    "unused": {**SMALL, "find_unused_parameters": True},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
    "float64 sums": {**SMALL, "mixed_precision": MixedPrecision(reduce_dtype="float64")},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@ranks(2, group=None)
def test_it_trains_as_one_process(rank: int, options: dict[str, Any]) -> None:
    paddle_accelerator.join(rank)
    model = network()
    wrapped = DataParallel(model, nonfinite="raise", **options)
    alone = [on_cpu(model), on_cpu(model)]  # batch normalisation has the statistics of each rank
    optimizers = [
        paddle.optimizer.Momentum(0.05, 0.9, parameters=each.parameters()) for each in (model, *alone)
    ]
    for step in range(4):
        x = batch(seed=step)
        squares(wrapped(share(x, rank))).backward()
        backward_alone(alone, x)
        assert_mean(model, alone)
        for layer in alone:  # as if they had been averaged
            for ours, p in zip(model.parameters(), layer.parameters(), strict=True):
                if not p.stop_gradient:
                    p.grad.set_value(ours.grad.numpy().astype(np.float64))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.clear_grad(set_to_zero=step % 2 == 0)
    for ours, p in zip(model.parameters(), alone[0].parameters(), strict=True):
        if not p.stop_gradient:
            assert_allclose(ours.numpy(), p.numpy(), rtol=1e-4, atol=1e-5)


@ranks(2, group=None)
def test_a_model_on_a_device_is_wrapped_while_tensors_are_made_on_the_cpu(rank: int) -> None:
    paddle_accelerator.join(rank)
    model = network()
    alone = [on_cpu(model), on_cpu(model)]
    with place("cpu"):
        wrapped = DataParallel(model, **SMALL)
    x = batch()
    squares(wrapped(share(x, rank))).backward()
    backward_alone(alone, x)
    assert_mean(model, alone)


@pytest.mark.parametrize("view", [False, True])
@ranks(2, group=None)
def test_weights_micro_batches_and_frozen_parameters(rank: int, view: bool) -> None:
    paddle_accelerator.join(rank)
    model = network()
    model[0].bias.stop_gradient = True
    wrapped = DataParallel(model, gradient_as_bucket_view=view, **SMALL)
    alone = [on_cpu(model), on_cpu(model)]
    for layer in alone:
        layer[0].bias.stop_gradient = True
    for step in range(3):
        for layer in (wrapped, *alone):
            layer.clear_gradients(set_to_zero=step == 1)
        x, more = batch(seed=step), batch(seed=10 + step)
        if step == 2:  # with weights, and in one contribution
            wrapped.weight(3.0 if rank else 1.0)
            squares(wrapped(share(x, rank))).backward()
            backward_alone(alone, x)
            assert_mean(model, alone, [1.0, 3.0])
            continue
        with wrapped.no_sync():
            squares(wrapped(share(x, rank))).backward()
        squares(wrapped(share(more, rank))).backward()
        backward_alone(alone, x)
        backward_alone(alone, more)
        assert_mean(model, alone)
    assert wrapped.grad_norm() == pytest.approx(
        np.sqrt(sum(float((p.grad.numpy().astype(np.float64) ** 2).sum()) for p in trained(model))), rel=1e-5
    )


def trained(model: nn.Layer) -> Iterator[paddle.Tensor]:
    return (p for p in model.parameters() if not p.stop_gradient and p.grad is not None)


@pytest.mark.parametrize("view", [False, True])
@ranks(2, group=None)
def test_gradients_that_lie_otherwise_are_added_up(rank: int, view: bool) -> None:
    """The gradients of a transposed weight, over several backwards."""
    paddle_accelerator.join(rank)

    class Transposed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.create_parameter([3, 4])

        def forward(self, factors: paddle.Tensor) -> paddle.Tensor:
            return (self.weight.t() * factors).sum()

    model, factors = Transposed(), np.arange(12, dtype=np.float32).reshape(4, 3)
    wrapped = DataParallel(model, gradient_as_bucket_view=view)
    for count in range(1, 4):
        wrapped(paddle.to_tensor(factors * (1 + rank))).backward()
        assert_allclose(model.weight.grad.numpy(), 1.5 * count * factors.T)


@ranks(2, group=None)
def test_parameters_and_buffers_begin_as_on_rank_0(rank: int) -> None:
    paddle_accelerator.join(rank)
    model = network()
    for p in model.parameters():
        p.set_value(p + 1.0 + rank)
    with place("cpu"):  # a buffer that was left on the device
        model.register_buffer("steps", paddle.full([3], rank, "int64"))
    model.register_buffer("flags", paddle.to_tensor([True, bool(rank)]))
    wrapped = DataParallel(model)
    assert model.steps.place.is_cpu_place() and not model.flags.place.is_cpu_place()
    assert_array_equal(model.steps.numpy(), [0, 0, 0])
    assert_array_equal(model.flags.numpy(), [True, False])
    expected = network()
    for ours, p in zip(model.parameters(), expected.parameters(), strict=True):
        assert_array_equal(ours.numpy(), (p + 1.0).numpy())
    wrapped(share(batch(), rank)).sum().backward()


@ranks(2, group=None)
def test_a_backward_that_raises_is_reported_to_all(rank: int) -> None:
    class Fails(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, dy: paddle.Tensor) -> paddle.Tensor:
            if fails:
                raise ValueError("on purpose")
            return dy

    paddle_accelerator.join(rank)
    model = network()
    wrapped = DataParallel(model, gradient_as_bucket_view=True, **SMALL)
    model[2].register_forward_post_hook(lambda layer, inputs, out: Fails.apply(out))
    alone = [on_cpu(model), on_cpu(model)]
    for number in range(4):
        wrapped.clear_gradients()
        fails = number in (1, 2) and rank == 1
        if number in (1, 2):
            with pytest.raises(OSError if fails else SkippedPassError):
                squares(wrapped(share(batch(), rank))).backward()
            continue
        squares(wrapped(share(batch(), rank))).backward()
    backward_alone(alone, batch())
    assert_mean(model, alone)


@ranks(2, group=None)
def test_what_is_wrong_is_named(rank: int) -> None:
    paddle_accelerator.join(rank)
    for argument in ({"device_ids": [rank + 1]}, {"device_ids": ["cpu"]}, {"output_device": 7}):
        with pytest.raises(ConfigError, match="names a device that the parameters are not on"):
            DataParallel(network(), **argument)
    for named in (rank, f"{KIND}:{rank}", KIND, paddle.ones([1]).place):
        DataParallel(network(), device_ids=[named])
    with pytest.raises(ConfigError, match="parameters on a device"):
        DataParallel(network(), reduce_through="memory")
    with place("cpu"):
        unknown_peer = network()
    with pytest.raises(ConfigError, match="cannot move these tensors"):
        DataParallel(unknown_peer, reduce_through="group")
    wrapped = DataParallel(network(), nonfinite="raise", **SMALL)
    with pytest.raises(NonFiniteGradientError, match=r"on rank 1 of 2") as caught:
        wrapped(paddle.full([2, 4], float("inf") if rank else 1.0)).sum().backward()
    assert "0.weight" in str(caught.value)
    wrapped.clear_gradients()
    wrapped(share(batch(), rank)).sum().backward()


@ranks(2, group=None)
def test_a_parameter_that_one_rank_does_not_use(rank: int) -> None:
    paddle_accelerator.join(rank)
    for view in (False, True):
        model = Branches()
        wrapped = DataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=view, **SMALL)
        for _ in range(2):
            wrapped.clear_gradients(set_to_zero=False)
            wrapped(paddle.full([1, 3], 1.0 + rank), ("right", "left")[rank]).sum().backward()
            assert_array_equal(model.left.weight.grad.numpy(), np.full((3, 2), 1.0))
            assert_array_equal(model.right.weight.grad.numpy(), np.full((3, 2), 0.5))
            assert not model.right.weight.grad.place.is_cpu_place()


def mean(state: Any, bucket: Any) -> Any:
    return bucket.all_reduce(bucket.buffer()).then(lambda f: f.value() / bucket.world_size)


def in_bfloat16(state: Any, bucket: Any) -> Any:
    """The advice of a compressing hook's error on a GPU."""
    wide, narrow = bucket.buffer(), bucket.buffer().astype("bfloat16")
    return bucket.all_reduce(narrow).then(lambda f: f.value().astype(wide.dtype) / bucket.world_size)


@pytest.mark.parametrize(("hook", "rtol"), [(mean, 1e-4), (in_bfloat16, 3e-2)])
@ranks(2, group=None)
def test_communication_hooks(rank: int, hook: Callable[[Any, Any], Any], rtol: float) -> None:
    paddle_accelerator.join(rank)
    model = network()
    wrapped = DataParallel(model, **SMALL)
    wrapped.register_comm_hook(None, hook)
    alone = [on_cpu(model), on_cpu(model)]
    for _ in range(2):
        for layer in (wrapped, *alone):
            layer.clear_gradients()
        squares(wrapped(share(batch(), rank))).backward()
        backward_alone(alone, batch())
        for ours, *each in zip(model.parameters(), *(layer.parameters() for layer in alone), strict=True):
            if not ours.stop_gradient:
                expected = sum(p.grad.numpy() for p in each) / 2
                assert_allclose(ours.grad.numpy(), expected, rtol, rtol * np.abs(expected).max() + 1e-6)


@ranks(2, group=None)
def test_ranks_with_different_numbers_of_batches(rank: int) -> None:
    paddle_accelerator.join(rank)
    model = two_layers()
    wrapped = DataParallel(model, gradient_as_bucket_view=True, **SMALL)
    optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
    with wrapped.join():
        for step in range(2 + 2 * rank):
            squares(wrapped(share(batch(seed=step), rank))).backward()
            optimizer.step()
            optimizer.clear_grad()
    for parameter in model.parameters():
        paddle_accelerator.assert_same_on_both(parameter)


@ranks(2, group=None)
def test_batch_normalisation_over_all_ranks(rank: int) -> None:
    paddle_accelerator.join(rank)
    model = SyncBatchNorm.convert_sync_batchnorm(network())
    wrapped = DataParallel(model)
    alone = on_cpu(network())
    squares(wrapped(share(batch(), rank))).backward()
    with place("cpu"):
        squares(alone(paddle.to_tensor(batch(), dtype="float64"))).backward()
    assert_mean(model, [alone])


@ranks(2, group=None)
def test_recomputed_layers(rank: int) -> None:
    class Recomputes(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return recompute(self.layers, x)

    paddle_accelerator.join(rank)
    model = Recomputes()
    wrapped = DataParallel(model, **SMALL)
    alone = [on_cpu(model.layers), on_cpu(model.layers)]
    x = share(batch(), rank)
    x.stop_gradient = False
    squares(wrapped(x)).backward()
    backward_alone(alone, batch())
    assert_mean(model, alone)


@ranks(2, group=None, dies={1: signal.SIGKILL})
def test_a_rank_that_is_killed_in_mid_backward_is_named(rank: int) -> None:
    paddle_accelerator.join(rank)
    model = network()
    wrapped = DataParallel(model, timeout_s=8.0, **SMALL)
    squares(wrapped(share(batch(), rank))).backward()
    if rank == 1:
        model[3].weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PeerLostError, match=r"[Rr]ank 1 of 2"):
        squares(wrapped(share(batch(), rank))).backward()


@pytest.mark.skipif(paddle_accelerator.IS_CUDA, reason="the delay of a GPU is unknown")
@ranks(2, group=None)
def test_a_device_that_is_far_behind(rank: int) -> None:
    os.environ[LAG_US] = "20000"
    paddle_accelerator.join(rank)
    model = two_layers()
    wrapped = DataParallel(model, gradient_as_bucket_view=True)
    alone = copy.deepcopy(model)
    for p in alone.parameters():
        drop_grad(p)
    squares(wrapped(share(batch(), rank))).backward()
    squares(alone(paddle.to_tensor(batch()))).backward()
    for ours, p in zip(model.parameters(), alone.parameters(), strict=True):
        assert_allclose(ours.grad.numpy(), p.grad.numpy(), rtol=1e-5, atol=1e-6)
