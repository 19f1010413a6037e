"""The Paddle adapter of the conformance tests, with gradients reduced through paddle.distributed."""

from __future__ import annotations

from typing import Any

from paddle import nn

from paceline.paddle import DataParallel
from tests.multiprocess.conformance_paddle import *  # noqa: F403
from tests.multiprocess.paddle_models import join_paddle


def join(rank: int, world_size: int) -> None:
    join_paddle(rank)


def wrap(model: nn.Layer, group: Any, **options: Any) -> DataParallel:
    join(group.rank, group.world_size)
    wrapped = DataParallel(model, reduce_through="group", **options)
    assert wrapped.gradient_path == "group"
    return wrapped
