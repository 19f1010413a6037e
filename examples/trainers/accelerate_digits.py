"""Trains a small network on handwritten digits with Accelerate.

    paceline run -n 2 examples/trainers/accelerate_digits.py
    accelerate launch --multi_gpu --num_processes 2 examples/trainers/accelerate_digits.py   # on the CPU, too

The line that uses Paceline is marked with (1).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.accelerate import use_paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    set_seed(0)
    accelerator = use_paceline(Accelerator(cpu=True))  # (1) prepare() wraps models in Paceline's class
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for _ in range(args.epochs):
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, wrapped by {type(model).__module__}")
    if args.report:
        report = {"losses": losses, "wrapper": type(model).__module__}
        (args.report / f"{accelerator.process_index}.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
