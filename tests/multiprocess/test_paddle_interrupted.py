"""After a backward that raises: its gradients do not count, and no rank writes to them any more."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import paddle
import pytest
from numpy.testing import assert_array_equal
from paddle import nn

from paceline.errors import PeerLostError, SkippedPassError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    join_paddle,
    paths,
    ranks,
    two_layers,
)


class Breaks(paddle.autograd.PyLayer):
    """Its backward raises while `is_broken` is not empty."""

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
    """With `hides`, its output is an object in which Paceline finds no tensor."""

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
@ranks(2, group=None)
def test_every_rank_raises_once_and_all_continue(rank: int, path: str, view: bool) -> None:
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
            else:
                with pytest.raises(SkippedPassError, match="rank 0 of 2 ended in an exception"):
                    first.backward()
            if again == "finished":
                wrapped.finish()
            elif again != "forward":
                wrapped.clear_gradients()
                second.backward()
                assert_array_equal(model.second.bias.grad.numpy(), [1, 1])
            del first, second
            for _ in range(2):
                wrapped.clear_gradients()
                total(wrapped(x)).backward()
                assert_array_equal(model.second.bias.grad.numpy(), [1, 1])
                assert_array_equal(model.first.weight.grad[0].numpy(), 1.5 * model.first.bias.grad.numpy())


def is_shared(tensor: paddle.Tensor) -> bool:
    """Return whether its elements lie in memory that another process may have mapped."""
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
