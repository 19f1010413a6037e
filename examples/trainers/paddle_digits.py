"""Trains a small network on handwritten digits with Paddle's own trainers: hapi's `paddle.Model`, or fleet.

    paceline run -n 2 examples/trainers/paddle_digits.py
    paceline run -n 2 examples/trainers/paddle_digits.py --trainer fleet

The lines that use Paceline are marked with (1). `paceline run --replace-ddp` does the same without them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset
from sklearn.datasets import load_digits

import paceline.paddle


class Losses(paddle.callbacks.Callback):
    """Keeps the loss of each step of hapi."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Called by hapi."""
        self.seen.append(float(np.ravel(logs["loss"])[0]))


def with_hapi(network: nn.Layer, optimizer: Any, data: TensorDataset, epochs: int) -> tuple[list[float], str]:
    """Train with `paddle.Model.fit`, which wraps the network by itself."""
    model = paddle.Model(network)
    model.prepare(optimizer, nn.CrossEntropyLoss())
    losses = Losses()
    model.fit(data, batch_size=32, epochs=epochs, verbose=0, drop_last=True, callbacks=[losses])
    return losses.seen, type(model._adapter.ddp_model).__module__


def with_fleet(
    network: nn.Layer, optimizer: Any, data: TensorDataset, epochs: int
) -> tuple[list[float], str]:
    """Train in a loop with `fleet.distributed_model`."""
    fleet.init(is_collective=True)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(network)
    sampler = DistributedBatchSampler(data, 32, shuffle=True, drop_last=True)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_sampler=sampler):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    return losses, type(model).__module__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trainer", choices=["hapi", "fleet"], default="hapi")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    paceline.paddle.replace_ddp()  # (1) paddle.DataParallel is Paceline's from here on
    paddle.set_device("cpu")
    paceline.paddle.init_parallel_env()  # (1) like Paddle's own, with the ranks of any launcher
    paddle.seed(0)
    np.random.seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset([paddle.to_tensor(images / 16, dtype="float32"), paddle.to_tensor(labels)])
    network = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1D(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = paddle.optimizer.Momentum(0.1, momentum=0.9, parameters=network.parameters())

    train = with_hapi if args.trainer == "hapi" else with_fleet
    losses, wrapper = train(network, optimizer, data, args.epochs)
    rank = paddle.distributed.get_rank()
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, wrapped by {wrapper}")
    if args.report:
        (args.report / f"{rank}.json").write_text(json.dumps({"losses": losses, "wrapper": wrapper}))


if __name__ == "__main__":
    main()
