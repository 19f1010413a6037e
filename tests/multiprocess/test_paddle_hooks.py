"""The mean includes the effects of users' hooks, whenever they are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.testing import assert_array_equal

from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    assert_same_on_all_ranks,
    drop_grad,
    join_paddle,
    joined_ranks,
    kept_ranks,
    paths,
    two_layers,
)

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
        drop_grad(parameter)
        parameter.grad = half

    return hook


@paths
@pytest.mark.parametrize("hook", [halve, replace, renew])
@joined_ranks(2)
def test_results_of_a_hook_registered_after_wrapping_are_averaged(
    rank: int, path: str, view: bool, hook: Hook
) -> None:
    """Of any kind, and registered before any backward: it acts like one that was there before wrapping."""
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
    """Compares ranks over paddle.distributed."""

    def all_gather(self, array: np.ndarray) -> list[np.ndarray]:
        found: list[paddle.Tensor] = []
        paddle.distributed.all_gather(found, paddle.to_tensor(array.reshape(-1)))
        return [each.numpy() for each in found]


@kept_ranks(2)
def test_results_of_a_hook_before_accumulation_are_averaged(group: Any) -> None:
    model = two_layers()
    wrapped = DataParallel(model, group=group)
    for step in range(3):
        if step == 1:
            model[2].bias.register_hook(lambda gradient: gradient.clip(-1, 1))
        wrapped.clear_gradients()
        (wrapped(paddle.ones([1, 4])) * (0.5 + group.rank)).sum().backward()
        assert_array_equal(model[2].bias.grad.numpy(), np.full(2, 0.75 if step else 1.0, np.float32))
