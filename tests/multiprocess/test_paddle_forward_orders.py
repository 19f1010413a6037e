"""Whether a backward is averaged is a matter of its own forward, whatever forwards came in between."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import pytest
from numpy.testing import assert_allclose
from paddle import nn

from paceline.paddle import DataParallel
from tests.multiprocess.forward_orders import ORDERS, expected, run
from tests.multiprocess.paddle_models import join_paddle, ranks


class Scale(nn.Layer):
    """Two weights, so that a pass has more than one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))
        self.b = self.create_parameter([3], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.a.sum() * x + self.b.sum() * x


@pytest.mark.parametrize("path", ["memory", "group"])
@ranks(2, group=None)
def test_a_backward_is_averaged_as_its_forward_asks(rank: int, path: str) -> None:
    join_paddle(rank)
    for order in ORDERS:
        model = DataParallel(Scale(), reduce_through=path)

        def backward(outputs: Sequence[paddle.Tensor]) -> None:
            paddle.stack(list(outputs)).sum().backward()

        run(order, rank, lambda value: model(paddle.to_tensor(value)), backward, model.no_sync)  # noqa: B023
        wanted = expected(order, 2)[rank]
        for parameter in model.parameters():
            assert_allclose(parameter.grad.numpy(), wanted, rtol=1e-6, err_msg=order)
