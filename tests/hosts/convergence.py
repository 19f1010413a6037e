"""Training on handwritten digits with gradients that are compressed between hosts, beside uncompressed ones.

python -m tests.hosts.convergence --epochs 8 --seeds 3

Two hosts of one rank, which are processes of this machine that are told so: what converges does not depend on
how fast the link is. scikit-learn's copy of the UCI digits, nothing to download.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from paceline.rendezvous import shared_memory
from paceline.torch import DistributedDataParallel
from tests.harness import run_ranks
from tests.hosts.rank import COMPRESSED

WAYS = (None, *COMPRESSED)
BATCH = 32


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of 8x8 and what they show, shuffled; the first 360 are for the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16, torch.tensor(digits.target)[
        order
    ]


def network() -> nn.Module:
    """A small convolutional network, of 160,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


def train(rank: int, compression: str | None, seed: int, epochs: int) -> tuple[list[float], float]:
    """Mean training loss of each epoch, and the accuracy of the test at the end."""
    x, y = images()
    torch.manual_seed(seed)
    model = DistributedDataParallel(network(), compress_between_hosts=compression)
    assert model.gradient_path == "hosts"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        order = (
            torch.randperm(len(y) - 360, generator=torch.Generator().manual_seed(1000 * seed + epoch)) + 360
        )
        found = []
        for batch in order.split(BATCH):
            mine = batch[rank::2]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(statistics.mean(found))
    model.check_replicas(optimizer)
    with torch.no_grad():
        right = (model.module(x[:360]).argmax(1) == y[:360]).float().mean().item()
    return losses, right


def run(rank: int, seeds: int, epochs: int) -> dict[str, Any]:
    """Every way with every seed."""
    shared_memory._host_hint = lambda: (f"host {rank}", shared_memory._Obstacle())
    return {str(way): [train(rank, way, seed, epochs) for seed in range(seeds)] for way in WAYS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = run_ranks(
        run, 2, {"seeds": options.seeds, "epochs": options.epochs}, group="gloo", deadline_s=3600
    )
    print("| between hosts | loss of epoch 1 | of the middle one | of the last one | test accuracy |")
    print("|---|---|---|---|---|")
    for way, runs in found[0].items():
        epochs = (0, options.epochs // 2, options.epochs - 1)
        cells = [way, *(f"{statistics.mean(losses[epoch] for losses, _ in runs):.4f}" for epoch in epochs)]
        rights = sorted(right for _, right in runs)
        cells.append(f"{statistics.mean(rights):.4f} ({rights[0]:.4f}-{rights[-1]:.4f})")
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
