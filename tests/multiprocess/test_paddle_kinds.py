"""Paddle's parameters and buffers that are sparse, have no memory yet, or are strided."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paceline.errors import ConfigError
from paceline.paddle import DataParallel
from tests.harness import kept_ranks

DENSE = {
    "windows": lambda value: paddle.as_strided(paddle.arange(6, dtype="float32") * value, [4, 3], [1, 1]),
    "expanded": lambda value: paddle.full([2, 1], value).expand([2, 3]),
    "steps": lambda value: (paddle.arange(6, dtype="float32") * value)[::2],
    "transposed": lambda value: (paddle.arange(6, dtype="float32") * value).reshape([2, 3]).t(),
}
OTHERS = {
    "coo": lambda value: paddle.sparse.sparse_coo_tensor([[0, 1], [0, 1]], [value, value], [3, 3]),
    "csr": lambda value: paddle.sparse.sparse_csr_tensor([0, 1, 2, 2], [0, 1], [value, value], [3, 3]),
    "empty": lambda value: paddle.Tensor(),
}


@kept_ranks(2, framework="paddle")
def test_strided_buffers_are_broadcast_and_others_are_left_alone(group: Any) -> None:
    layer = paddle.nn.Linear(3, 2)
    for kind, make in {**DENSE, **OTHERS}.items():
        layer.register_buffer(kind, make(1.0 + group.rank))
    ddp = DataParallel(layer)
    for _ in range(2):
        ddp(paddle.ones([2, 3])).sum().backward()
        for kind, make in DENSE.items():
            assert getattr(layer, kind).tolist() == make(1.0).tolist(), kind
    assert layer.weight.grad.tolist() == [[2.0, 2.0]] * 3 or layer.weight.grad.tolist() == [[4.0, 4.0]] * 3
    for kind in ("coo", "csr"):
        assert getattr(layer, kind).values().tolist() == [1.0 + group.rank] * 2


@kept_ranks(2, framework="paddle")
def test_parameters_that_are_not_initialised_are_refused(group: Any) -> None:
    with paddle.LazyGuard():
        layer = paddle.nn.Linear(3, 2)
    with pytest.raises(ConfigError):
        DataParallel(layer)
