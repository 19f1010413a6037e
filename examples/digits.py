"""Trains a small network on handwritten digits, on one process or on several.

An ordinary torch training loop. The lines that make it run on several processes are marked with (1) to (5).

    python examples/digits.py                                                # one process
    paceline run -n 2 examples/digits.py                                     # two
    torchrun --nproc-per-node 2 examples/digits.py --ddp torch               # two, with torch's own DDP

The data is scikit-learn's copy of the UCI digits: 1797 images of 8x8 pixels, nothing to download.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from live import Live, waited_s
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import DistributedSampler


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:  # (1) several processes: let them find each other
        dist.init_process_group("gloo")
    rank, ranks = place()
    if args.batch % ranks:
        raise SystemExit(f"--batch {args.batch} can't be shared equally by {ranks} processes")

    train_data, test_data = load_data()
    # (2) each process gets its own part of every epoch
    sampler = DistributedSampler(train_data, num_replicas=ranks, rank=rank, seed=args.seed)
    # (3) --batch counts the samples of all processes together
    loader = DataLoader(train_data, batch_size=args.batch // ranks, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = MODELS[args.model]()
    if dist.is_initialized():
        model = wrap(model, args.ddp)  # (4) from here on, backward() averages the gradients of all processes
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    speed = train(model, optimizer, loader, sampler, args)
    accuracy = evaluate(model, test_data)
    finish(args, model, accuracy, speed)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, ...]],
    sampler: DistributedSampler,
    args: argparse.Namespace,
) -> float:
    """Train for `args.epochs` and return the speed in samples per second, all processes together."""
    seconds = 0.0
    with Live("digits", args.epochs * len(loader), is_shown=place()[0] == 0) as live:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # (5) another order in every epoch, the same on all processes
            start = time.perf_counter()
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                live.step(epoch + 1, loss.item(), samples=args.batch, waited_s=waited_s(model))
            if epoch > 0:  # the first one warms up
                seconds += time.perf_counter() - start
    return (args.epochs - 1) * len(loader) * args.batch / seconds if seconds else 0.0


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images to train on and 360 to test with, the same ones on every process."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build_cnn() -> nn.Module:
    """Return a small convolutional network, designed so that 1 and N processes can be compared by weight.

    It has no batch normalisation and no dropout: with those, the result of one process for a batch is not the
    mean of the results of several processes for its parts. Nor has it units with a kink (ReLU, max pooling):
    a difference in the last bit can switch such a unit on or off, and grow to 1e-2 in the weights. Smooth
    units keep the difference near 1e-6.
    """
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


class RowReader(nn.Module):
    """Reads an image row by row with a GRU of two layers, and classifies the digit at the end.

    Each of its steps waits for the previous one, and is small: torch uses a second thread for an operation
    only from 32,768 elements on, and here an operation has 120 x 192 at most. So one process uses little more
    than one core, however many there are, and several processes, each with a part of the batch, use all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(input_size=8, hidden_size=64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.gru(images.squeeze(1))
        logits: Tensor = self.head(states[:, -1])
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": build_cnn, "gru": RowReader}


def wrap(model: nn.Module, ddp: str) -> nn.Module:
    """Wrap the model in Paceline's DistributedDataParallel or torch's; the rest of the script is the same."""
    if ddp == "torch":
        from torch.nn.parallel import DistributedDataParallel as DDP
    else:
        from paceline.torch import DistributedDataParallel as DDP
    return DDP(model)


def evaluate(model: nn.Module, data: TensorDataset) -> float:
    """Return the fraction of the test images that the model classifies correctly."""
    images, labels = data.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def finish(args: argparse.Namespace, model: nn.Module, accuracy: float, speed: float) -> None:
    """Print the result, and write the files that the options ask for."""
    rank, ranks = place()
    are_identical = replicas_are_identical(model)
    if rank == 0:
        replicas = f", replicas {'bit-identical' if are_identical else 'DIFFERENT'}" if ranks > 1 else ""
        print(f"test accuracy {accuracy:.4f}, {speed:,.0f} samples/s{replicas}", flush=True)
        if args.save:
            torch.save(getattr(model, "module", model).state_dict(), args.save)
        if args.report:
            report = {"accuracy": accuracy, "samples_per_s": speed, "replicas_are_identical": are_identical}
            args.report.write_text(json.dumps(report))
    if dist.is_initialized():
        dist.destroy_process_group()


def replicas_are_identical(model: nn.Module) -> bool:
    """Return whether every process has exactly the same weights, by comparing their SHA-256."""
    if not dist.is_initialized():
        return True
    digest = hashlib.sha256()
    for weights in model.state_dict().values():
        digest.update(weights.numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


def place() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def parse_arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--ddp", choices=("paceline", "torch"), default="paceline")
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=48, help="samples of one step, all processes together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE.pt", help="write the weights")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write accuracy and speed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
