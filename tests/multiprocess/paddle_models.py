"""Small models, data and references for the tests of paceline.paddle."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

from tests import harness
from tests.harness.rank_main import use_up

STORE_S = 20.0

ranks = functools.partial(harness.ranks, framework="paddle")
kept_ranks = functools.partial(harness.kept_ranks, framework="paddle")
# For tests that join Paddle's process group and leave no unmatched collective in it.
joined_ranks = functools.partial(harness.kept_ranks, framework="paddle.distributed", group=None)
# Through shared memory, with gradients of their own and with views, and through a process group.
paths = pytest.mark.parametrize(("path", "view"), [("memory", False), ("memory", True), ("group", False)])

KEEPS_EMPTY_GRADIENTS = not paddle.__version__.startswith("3.0.")
keeps_empty_gradients = pytest.mark.skipif(
    not KEEPS_EMPTY_GRADIENTS, reason="Paddle 3.0 takes a gradient without elements for none"
)

CLEARS = {
    "clear_gradients": nn.Layer.clear_gradients,
    "without zeros": lambda model: model.clear_gradients(set_to_zero=False),
    "each": lambda model: [p.clear_grad() for p in model.parameters()],
    "none": lambda model: [drop_grad(p) for p in model.parameters()],
}


class Branches(nn.Layer):
    """Uses the layer that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, x: paddle.Tensor, branch: str) -> paddle.Tensor:
        if branch == "both":
            return self.left(x) + self.right(x)
        if branch == "none":
            return x * 1
        return {"left": self.left, "right": self.right}[branch](x)


class Words(nn.Layer):
    """An embedding and a linear layer on it; with None nothing is looked up."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        paddle.seed(1)
        self.table, self.head = nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 2)

    def forward(self, words: paddle.Tensor | None) -> paddle.Tensor:
        return self.head(paddle.ones([2, 3]) if words is None else self.table(words))


def drop_grad(parameter: paddle.Tensor) -> None:
    """Do `parameter.grad = None`, which Paddle before 3.3 refuses."""
    try:
        parameter.grad = None
    except ValueError:
        parameter.clear_gradient(False)


def two_layers(width: int = 5) -> nn.Sequential:
    paddle.seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def batch(rows: int = 8, columns: int = 4, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def share(array: np.ndarray, rank: int, world_size: int = 2) -> paddle.Tensor:
    return paddle.to_tensor(np.split(array, world_size)[rank])


def squares(output: paddle.Tensor) -> paddle.Tensor:
    return (output**2).mean()


def train(
    model: nn.Layer,
    x: paddle.Tensor,
    steps: int = 3,
    clear: Callable[[nn.Layer], None] = nn.Layer.clear_gradients,
    call: Callable[[nn.Layer, paddle.Tensor], paddle.Tensor] = lambda model, x: model(x),
) -> None:
    """A few steps of SGD on the mean of the squared outputs."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for step in range(steps):
        clear(model)
        squares(call(model, x + 0.1 * step)).backward()
        optimizer.step()


def gradients(model: nn.Layer) -> list[np.ndarray | None]:
    return [None if p.grad is None else p.grad.numpy() for p in model.parameters()]


def bits(model: nn.Layer) -> list[bytes]:
    """All parameters, their gradients, and running statistics, as bytes."""
    found = [p.numpy().tobytes() for p in model.parameters()]
    return found + [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]


def assert_same_on_all_ranks(model: nn.Layer, group: object) -> None:
    for values in model.parameters():
        for tensor in (values, values.grad):
            if tensor is not None:
                gathered = group.all_gather(np.ascontiguousarray(tensor.numpy()).view(np.uint8))
                assert all(np.array_equal(gathered[0], other) for other in gathered)


def await_store(rank: int) -> None:
    """Wait until rank 0 serves Paddle's store: a rank that connects too early tries again only after 3 s."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + STORE_S
    while rank and time.monotonic() < deadline:
        try:
            socket.create_connection(address, 1.0).close()
            break
        except OSError:
            time.sleep(0.01)


def join_paddle(rank: int, backend: str = "gloo") -> None:
    """Initialise paddle.distributed, with the variables that Paddle's launcher would set.

    A kept rank that joined for an earlier test gets the variables that it had then.
    """
    if not _joined:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        os.environ |= {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": os.environ["WORLD_SIZE"],
            "PADDLE_CURRENT_ENDPOINT": f"{address}:{port + rank}",
            "PADDLE_MASTER": f"{address}:{port}",
            "PADDLE_DISTRI_BACKEND": backend,
        }
        await_store(rank)
        use_up(joined=True)  # a process joins paddle.distributed once
        dist.init_parallel_env()  # sets variables, too
        _joined.update((name, value) for name, value in os.environ.items() if name.startswith("PADDLE_"))
    os.environ |= _joined


_joined: dict[str, str] = {}
