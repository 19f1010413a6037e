"""Trains a small network on handwritten digits with Ray Train.

    python examples/trainers/ray_digits.py
    python examples/trainers/ray_digits.py --ddp replaced   # the same, with torch's class replaced
    python examples/trainers/ray_digits.py --ddp torch      # with torch's DDP, to compare

Connects to the Ray cluster that it finds, else starts one on this machine. The line that uses Paceline is
marked with (1): Ray's prepare_model() wraps the model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.torch
from paceline.integrations.ray_train import PacelineConfig


def train(config: dict[str, Any]) -> None:
    if config["replaces"]:
        paceline.torch.replace_ddp()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    network = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    loader = ray.train.torch.prepare_data_loader(loader)

    losses = []
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    context = ray.train.get_context()
    wrapper = type(model).__module__
    if context.get_world_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, wrapped by {wrapper}")
    if config["report"]:
        report = {"losses": losses, "wrapper": wrapper}
        Path(config["report"], f"{context.get_world_rank()}.json").write_text(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ddp", choices=["paceline", "replaced", "torch"], default="paceline")
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    report = args.report and str(args.report.resolve())
    config = {"epochs": args.epochs, "report": report, "replaces": args.ddp == "replaced"}
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=PacelineConfig() if args.ddp == "paceline" else TorchConfig(),  # (1)
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(storage_path=storage),
        ).fit()


if __name__ == "__main__":
    main()
