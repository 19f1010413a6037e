"""From one pass of paceline.paddle to the next: cleared gradients, errors, hooks of users, uneven data."""

from __future__ import annotations

import paddle
import pytest
from numpy.testing import assert_array_equal
from paddle import nn

from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import CLEARS, join_paddle, ranks

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
