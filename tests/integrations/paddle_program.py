"""The training of two ranks with hapi and with fleet: with paddle.DataParallel and with Paceline's class."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset

import paceline.paddle


def data() -> TensorDataset:
    made = np.random.default_rng(1)
    inputs = made.standard_normal((96, 6)).astype(np.float32)
    targets = inputs @ made.standard_normal((6, 2)).astype(np.float32)
    return TensorDataset([paddle.to_tensor(inputs), paddle.to_tensor(targets)])


def network() -> nn.Layer:
    paddle.seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1D(16), nn.ReLU(), nn.Linear(16, 2))


class Losses(paddle.callbacks.Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Called by hapi."""
        self.seen.append(float(np.ravel(logs["loss"])[0]))


def hapi() -> dict[str, Any]:
    """paddle.Model's fit() and evaluate(), gradients accumulated over two batches."""
    model = paddle.Model(network())
    optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
    model.prepare(optimizer, nn.MSELoss())
    losses = Losses()
    model.fit(
        data(),
        batch_size=8,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[losses],
        accumulate_grad_batches=2,
    )
    evaluation = model.evaluate(data(), batch_size=8, verbose=0)
    return {
        "running": model.network[1]._mean.numpy().tolist(),
        "losses": losses.seen,
        "wrapper": type(model._adapter.ddp_model).__module__,
        "evaluation": float(np.ravel(evaluation["loss"])[0]),
    }


def with_fleet() -> dict[str, Any]:
    """fleet's model and optimizer, and Paddle's own sampler."""
    fleet.init(is_collective=True)
    inner = network()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.05, parameters=inner.parameters()))
    model = fleet.distributed_model(inner)
    samples = data()
    loader = DataLoader(samples, batch_sampler=DistributedBatchSampler(samples, 8))
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    return {"losses": losses, "wrapper": type(model).__module__}


CASES: dict[str, Callable[[], dict[str, Any]]] = {"hapi": hapi, "fleet": with_fleet}


def main() -> None:
    warnings.simplefilter("ignore")  # hapi copies tensors in a way that Paddle advises against
    paddle.set_device("cpu")
    paddle.distributed.init_parallel_env()
    found = {}
    for name, run in CASES.items():
        theirs = run()
        with paceline.paddle.replace_ddp():
            found[name] = [theirs, run()]
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
