"""Trains PEFT adapters on handwritten digits, on top of weights that torchao has quantised to 8 bits.

    paceline run -n 2 examples/trainers/adapters_digits.py

The line that uses Paceline is marked with (1): it wraps the model after quantisation, with its adapters.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization import Int8WeightOnlyConfig, quantize_

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
    base = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    quantize_(base, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "0")
    adapters = peft.LoraConfig(r=8, target_modules=["0"], modules_to_save=["2"])
    model = paceline.torch.DistributedDataParallel(peft.get_peft_model(base, adapters))  # (1)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)

    losses: list[float] = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.3f}")
    if args.report:
        report = {"losses": losses, "wrapper": type(model).__module__}
        (args.report / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
