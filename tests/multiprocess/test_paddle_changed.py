"""Parameters that got a value of another shape after wrapping are refused on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_array_equal
from paddle import nn

from paceline.errors import ConfigError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    CLEARS,
    Words,
    join_paddle,
    paths,
    ranks,
)

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
@ranks(2, group=None)
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
        if paddle.__version__ < "3.3":
            continue  # there a parameter whose `.data` was set gets no gradient any more
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
