"""Mixed precision in paceline.paddle: which dtype is used for computing, averaging and storing."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

from paceline.errors import ConfigError, ModelMismatchError
from paceline.paddle import DataParallel, MixedPrecision
from tests.multiprocess.paddle_models import join_paddle, joined_ranks, kept_ranks

X = np.random.default_rng(3).standard_normal((2, 4))
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Half the distance from 1 to the next number."""


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest number of this dtype, ties to even; the result is float64."""
    if dtype != "bfloat16":
        return array.astype(dtype).astype(np.float64)
    bits = array.astype(np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


class Scaled(nn.Layer):
    """x * weight, whose gradient is x, so that only casts round; and two buffers."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.scale = self.create_parameter([4], dtype=dtype)
        self.register_buffer("shift", paddle.ones([4]))
        self.register_buffer("count", paddle.ones([1], "int64"))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.scale


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("path", ["memory", "group"])
@joined_ranks(2)
def test_gradients_are_averaged_in_reduce_dtype(rank: int, path: str, view: bool) -> None:
    """Each rank's gradient and the mean are rounded to it; .grad has the parameter's dtype."""
    join_paddle(rank)
    for reduced in ("bfloat16", "float16", "float64", paddle.bfloat16):
        name = str(reduced).removeprefix("paddle.")
        layer = Scaled()
        wrapped = DataParallel(
            layer,
            mixed_precision=MixedPrecision(reduce_dtype=reduced),
            reduce_through=path,
            gradient_as_bucket_view=view,
        )
        for _ in range(2):
            wrapped.clear_gradients()
            output = wrapped(paddle.to_tensor(X[rank], "float32"))
            assert output.dtype == paddle.float32
            output.sum().backward()
            mean = sum(rounded(rounded(x, "float32"), name) for x in X) / 2
            assert layer.scale.dtype == layer.scale.grad.dtype == paddle.float32
            # A group adds in this dtype, and then divides.
            units = (
                4 if paddle.__version__ < "3.2" else 2
            )  # older versions truncate when they cast to float16
            assert_allclose(layer.scale.grad.numpy(), mean, rtol=units * UNIT[name] + UNIT["float32"], atol=0)
            if name != "float64":  # check that it was rounded
                assert_array_equal(rounded(layer.scale.grad.numpy(), name), layer.scale.grad.numpy())


@kept_ranks(2)
def test_forward_runs_in_param_dtype(group: Any) -> None:
    """The reference is float64 in numpy; float32 would be 1e-7 away."""
    paddle.seed(5)
    table, head = nn.Linear(4, 4, bias_attr=False), nn.Linear(4, 1)
    table.register_buffer("shift", paddle.ones([4]))
    layer = nn.Sequential(table, table, head)  # shared: both uses contribute
    wrapped = DataParallel(layer, group=group, mixed_precision=MixedPrecision("float64", None, "float16"))
    assert table.shift.dtype == paddle.float16
    w, v = (p.numpy().astype(np.float64) for p in (table.weight, head.weight))
    b = head.bias.numpy().astype(np.float64)
    for _ in range(2):
        wrapped.clear_gradients()
        output = wrapped(paddle.to_tensor(X[group.rank : group.rank + 1], "float32"))
        assert output.dtype == paddle.float64
        x = X.astype(np.float32).astype(np.float64)
        assert_allclose(output.numpy(), x[group.rank : group.rank + 1] @ w @ w @ v + b, rtol=1e-13)
        output.sum().backward()
        parts = [np.outer(r, (w @ v)[:, 0]) + np.outer(r @ w, v[:, 0]) for r in x]
        mean = sum(rounded(part, "float32") for part in parts) / 2  # backward rounds once, at its end
        assert_array_equal(table.weight.grad.numpy(), mean.astype(np.float32))
        assert table.weight.dtype == table.weight.grad.dtype == paddle.float32
    # The casts leave no trace in saved state or in what optimizers get.
    assert all(value.dtype != paddle.float64 for value in wrapped.state_dict().values())
    assert wrapped.parameters()[0] is table.weight and not table.weight.stop_gradient
    with paddle.no_grad():
        assert wrapped(paddle.ones([1, 4])).dtype == paddle.float64
    with pytest.raises(ValueError):  # an exception in forward leaves the parameters unchanged
        wrapped(paddle.ones([1, 7]))
    assert layer.state_dict()["0.weight"].dtype == paddle.float32


@kept_ranks(2)
def test_a_model_stored_in_16_bits_trains_in_32(group: Any) -> None:
    """A layer loaded in bfloat16, for which Paddle has no CPU kernels, still trains."""
    layer = nn.Linear(4, 3)
    layer.to(dtype="bfloat16")
    x = paddle.to_tensor(X[group.rank : group.rank + 1], "float32")
    with pytest.raises(RuntimeError, match="not registered"):
        layer(x.cast("bfloat16"))
    wrapped = DataParallel(layer, group=group, mixed_precision=MixedPrecision("float32"))
    wrapped(x).sum().backward()
    gradient = layer.weight.grad
    assert gradient.dtype == paddle.bfloat16
    each = sum(rounded(row, "bfloat16") for row in X) / 2  # autograd casts to the parameter's dtype
    expected = np.repeat(rounded(each, "bfloat16")[:, None], 3, 1)
    assert_allclose(gradient.cast("float64").numpy(), expected, rtol=2 * UNIT["bfloat16"])


@kept_ranks(2)
def test_running_statistics_have_the_dtype_of_forward(group: Any) -> None:
    norm = nn.BatchNorm1D(4)
    wrapped = DataParallel(
        norm, group=group, mixed_precision=MixedPrecision("float64", buffer_dtype="float16")
    )
    batch = np.random.default_rng(group.rank).standard_normal((8, 4)).astype(np.float32)
    wrapped(paddle.to_tensor(batch)).sum().backward()
    assert norm._mean.dtype == paddle.float64
    first = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32).astype(np.float64)
    momentum = float(np.float32(0.9))  # Paddle keeps it in float32
    assert_allclose(norm._mean.numpy(), (1 - momentum) * first.mean(0), rtol=1e-12)  # rank 0's, in float64


@kept_ranks(2)
def test_a_precision_that_paddle_does_not_support_is_refused(group: Any) -> None:
    for kind in ("matmul", "layer_norm", "relu", "softmax"):  # the operators that the error names
        one = paddle.ones([2, 2], "bfloat16")
        call = {
            "matmul": lambda one=one: paddle.matmul(one, one),
            "layer_norm": lambda one=one: nn.functional.layer_norm(one, 2),
            "relu": lambda one=one: nn.functional.relu(one),
            "softmax": lambda one=one: nn.functional.softmax(one),
        }[kind]
        with pytest.raises(RuntimeError, match="not registered"):
            call()
    with pytest.raises(RuntimeError, match="not registered"):
        nn.functional.conv2d(paddle.ones([1, 1, 2, 2], "bfloat16"), paddle.ones([1, 1, 1, 1], "bfloat16"))
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(ConfigError, match=rf"forward in {dtype}(?s:.*)reduce_dtype='{dtype}'"):
            DataParallel(nn.Linear(4, 1), group=group, mixed_precision=MixedPrecision(dtype))
    with pytest.raises(ConfigError, match=r"sparse gradients(?s:.*)sparse: weight"):
        DataParallel(nn.Embedding(3, 2, sparse=True), group=group, mixed_precision=MixedPrecision("float64"))
    with pytest.raises(ModelMismatchError, match="mixed_precision"):
        precision = MixedPrecision(reduce_dtype="float16" if group.rank else "bfloat16")
        DataParallel(nn.Linear(4, 1), group=group, mixed_precision=precision)
