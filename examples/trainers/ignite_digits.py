"""Trains a small network on handwritten digits with Ignite's engines, and evaluates after each epoch.

    paceline run -n 2 examples/trainers/ignite_digits.py

The line that uses Paceline is marked with (1): Ignite's engines take a model that is already wrapped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch
from paceline.data import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = paceline.torch.DistributedDataParallel(model)  # (1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    losses: list[float] = []
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: sampler.set_epoch(engine.state.epoch))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Any) -> None:
        evaluator.run(loader)
        if dist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: accuracy {evaluator.state.metrics['accuracy']:.3f}")

    trainer.run(loader, max_epochs=args.epochs)
    if args.report:
        report = {"losses": losses, "wrapper": type(model).__module__}
        (args.report / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
