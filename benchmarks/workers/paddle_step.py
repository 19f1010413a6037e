"""One training step of a Paddle model: alone, in paddle.DataParallel, and in Paceline's.

A step is what users write: clear_grad(), forward, loss, backward(), SGD. Before anything is timed, gradients
are compared with the mean over all ranks' batches, computed here without communication.
"""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from benchmarks.workers.all_reduce import time_calls
from paceline.paddle import DataParallel

Batch = tuple[paddle.Tensor, paddle.Tensor]
_MODELS: dict[str, tuple[list[int], int]] = {
    # Widths of the layers, and number of samples in a rank's batch.
    "toy": ([10, 10, 1], 10),  # as in Paddle's documentation
    "rl": ([64, 256, 256, 8], 64),
    "deep": ([64] * 23, 32),  # 43 parameters: shows the cost per parameter
    "mlp": ([1024] * 5, 32),
}


class Step:
    """A rank of a training.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        variant: `alone`, `paddle` or `paceline`.
        options: Further arguments of the DataParallel.
    """

    def __init__(self, rank: int, world_size: int, variant: str, **options: Any) -> None:
        self._rank = rank
        self._world_size = world_size
        self._variant = variant
        self._options = options
        if variant == "paddle":
            _form_group(rank, world_size)

    def prepare(self, model: str) -> dict[str, Any]:
        """Build and wrap the model and check one backward; return its size and its gradients' digest."""
        layer = _seeded(model)
        self._layer = self._wrap(layer)
        self._inputs, self._targets = _batch_of(model, self._rank)
        self._loss = nn.MSELoss()
        self._optimizer = paddle.optimizer.SGD(1e-4, parameters=layer.parameters())
        self._backward()
        gradients = [parameter.grad.numpy() for parameter in layer.parameters()]
        ranks = [self._rank] if self._variant == "alone" else list(range(self._world_size))
        _check_close(gradients, model, ranks)
        return {
            "parameters": sum(gradient.size for gradient in gradients),
            "tensors": len(gradients),
            "digest": hashlib.sha256(b"".join(g.tobytes() for g in gradients)).hexdigest(),
        }

    def time(self, iterations: int) -> float:
        """Return the seconds of `iterations` steps, after one untimed step that synchronizes the ranks."""
        return time_calls(self._step, iterations)

    def _wrap(self, layer: nn.Layer) -> nn.Layer:
        if self._variant == "alone":
            return layer
        kind = paddle.DataParallel if self._variant == "paddle" else DataParallel
        return kind(layer, **self._options)

    def _backward(self) -> None:
        self._optimizer.clear_grad()
        self._loss(self._layer(self._inputs), self._targets).backward()

    def _step(self) -> None:
        self._backward()
        self._optimizer.step()


def _form_group(rank: int, world_size: int) -> None:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    os.environ |= {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world_size),
        "PADDLE_MASTER": f"{address}:{port}",
        "PADDLE_CURRENT_ENDPOINT": f"{address}:{int(port) + 1 + rank}",  # a name only: nothing listens there
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    dist.init_parallel_env()


def _seeded(model: str) -> nn.Sequential:
    widths, _ = _MODELS[model]
    paddle.seed(0)
    layers: list[nn.Layer] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    if model == "deep":
        layers[-2] = nn.Linear(*widths[-2:], bias_attr=False)
    return nn.Sequential(*layers[:-1])


def _batch_of(model: str, rank: int) -> Batch:
    widths, samples = _MODELS[model]
    rng = np.random.default_rng(1000 + rank)
    inputs, targets = (rng.standard_normal((samples, width), np.float32) for width in (widths[0], widths[-1]))
    return paddle.to_tensor(inputs), paddle.to_tensor(targets)


def _check_close(gradients: list[np.ndarray[Any, Any]], model: str, ranks: list[int]) -> None:
    """Raise unless `gradients` are the mean over `ranks`, up to float32's rounding."""
    layer = _seeded(model)
    for rank in ranks:
        inputs, targets = _batch_of(model, rank)
        (nn.MSELoss()(layer(inputs), targets) / len(ranks)).backward()
    for (name, parameter), got in zip(layer.named_parameters(), gradients):
        want = parameter.grad.numpy()
        scale = float(np.abs(want).max())
        if not np.allclose(got, want, rtol=1e-3, atol=1e-4 * scale + 1e-7):
            worst = float(np.abs(got - want).max())
            raise ArithmeticError(f"wrong gradient of {name}: off by {worst:.3g} of {scale:.3g}")
