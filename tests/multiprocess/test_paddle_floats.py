"""paceline.paddle: the same bits on all ranks, whatever one of them has told its processor about floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import join_paddle, ranks
from tests.multiprocess.test_group_floats import KINDS, delicate, enter

COUNT = 1000


class Product(nn.Layer):
    """The gradient of its parameter is its input, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = self.create_parameter([COUNT])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.factor * x


@pytest.mark.parametrize("floats", [kind for kind in KINDS if kind != "flushed"])  # by torch alone
@ranks(2, group=None)
def test_a_mean_of_another_engine_that_is_corrected_has_the_same_bits(rank: int, floats: str) -> None:
    join_paddle(rank)
    model = Product()
    wrapped = DataParallel(model, reduce_through="group")
    expected = (delicate(0, COUNT).astype(np.float64) + 2 * delicate(1, COUNT).astype(np.float64)) / 3
    x = paddle.to_tensor(delicate(rank, COUNT))
    if rank == 1:
        enter(floats)
    wrapped.weight(rank + 1)  # 3 in all, where an equal share of each was expected: all ranks correct the sum
    wrapped(x).sum().backward()
    own = model.factor.grad.numpy()
    everybodys: list[paddle.Tensor] = []
    dist.all_gather(everybodys, paddle.to_tensor(own.view(np.int32)))
    for other in everybodys:
        assert_array_equal(own.view(np.int32), other.numpy())
    if rank == 0:
        assert_allclose(own[1::2], expected[1::2], rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("floats", [kind for kind in KINDS if kind != "flushed"])
@ranks(2)
def test_the_mean_of_sparse_rows_has_the_same_bits(group: Any, floats: str) -> None:
    table = nn.Embedding(3, COUNT, sparse=True)
    wrapped = DataParallel(nn.Sequential(table), group=group)
    x = paddle.to_tensor(delicate(group.rank, COUNT))
    if group.rank == 1:
        enter(floats)
    wrapped.weight(1 + 0.1 * group.rank)  # the sum of the weights is rounded, too
    (wrapped(paddle.to_tensor([1])) * x).sum().backward()
    rows = np.array(table.weight.grad.get_selected_rows().get_tensor())
    everybodys = group.all_gather(np.ascontiguousarray(rows).view(np.uint8))
    assert_array_equal(everybodys[0], everybodys[1])
