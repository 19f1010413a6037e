"""Paddle's side of `failing` and `launched`."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import paddle
import paddle.distributed as dist
from paddle import nn

import paceline.paddle
from paceline.paddle import DataParallel


def join(by_framework: bool) -> int:
    """Form the group with Paddle's own call or with Paceline's; return the rank of this process."""
    if not by_framework:
        paceline.paddle.init_parallel_env()
        return dist.get_rank()
    os.environ |= {
        "PADDLE_TRAINER_ID": os.environ["RANK"],
        "PADDLE_TRAINERS_NUM": os.environ["WORLD_SIZE"],
        "PADDLE_CURRENT_ENDPOINT": f"{socket.gethostname()}:1",
        "PADDLE_MASTER": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    dist.init_parallel_env()
    return dist.get_rank()


def backward_of(path: str, width: int = 64) -> Callable[[], None]:
    """Return a function that runs one backward of a model with width * (width + 1) parameters."""
    model = DataParallel(nn.Linear(width, width), reduce_through=path, timeout_s=60)
    assert model.gradient_path == ("hosts" if path == "auto" else "group")
    x = paddle.ones([4, width])

    def backward() -> None:
        model.clear_gradients()
        (model(x) ** 2).mean().backward()

    return backward


def gradient_of(rank: int) -> tuple[float, str]:
    """Return an averaged gradient of one backward, to which rank r contributes 2 (r + 1), and its path."""
    net = nn.Linear(4, 1)
    model = DataParallel(net)
    model(paddle.full([2, 4], rank + 1.0)).sum().backward()
    return float(net.weight.grad[0, 0]), model.gradient_path


def leave() -> None:
    """Wait for all ranks: rank 0, which serves Paddle's store, must not end before the others."""
    dist.barrier()


def world_size() -> int:
    return dist.get_world_size()


def end_at_once(status: int) -> None:
    """End without the framework's own shutdown."""
    os._exit(status)
