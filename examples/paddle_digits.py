"""Trains a small network on handwritten digits with PaddlePaddle, on one process or on several.

An ordinary Paddle training loop. The lines that make it run on several processes are marked with (1) to (4).

    python examples/paddle_digits.py                                         # one process
    paceline run -n 2 examples/paddle_digits.py                              # two
    paceline run -n 2 examples/paddle_digits.py --ddp paddle                 # two, with paddle.DataParallel

The data is scikit-learn's copy of the UCI digits: 1797 images of 8x8 pixels, nothing to download.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from live import Live, waited_s
from paddle import nn
from paddle.io import DataLoader, TensorDataset
from sklearn.datasets import load_digits

import paceline.paddle
from paceline.data import DistributedBatchSampler


def main() -> None:
    args = parse_arguments()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch % ranks:
        raise SystemExit(f"--batch {args.batch} can't be shared equally by {ranks} processes")
    paddle.set_device("cpu")
    group: Any = None
    if ranks > 1:  # (1) several processes: let them find each other
        group = dist.init_parallel_env() if args.ddp == "paddle" else paceline.paddle.init_parallel_env()

    train_data, test_data = load_data()
    # (2) each process gets its own part of every batch; --batch counts the samples of all processes together
    sampler = DistributedBatchSampler(
        train_data,
        global_batch_size=args.batch,
        num_replicas=ranks,
        rank=rank,
        shuffle=True,
        seed=args.seed,
        drop_last=True,
    )
    loader = DataLoader(train_data, batch_sampler=sampler)

    paddle.seed(args.seed)
    model = build_model()
    if ranks > 1:
        # (3) from here on, backward() averages the gradients of all processes
        model = paddle.DataParallel(model) if args.ddp == "paddle" else paceline.paddle.DataParallel(model)
    optimizer = paddle.optimizer.Momentum(args.lr, momentum=0.9, parameters=model.parameters())

    speed = train(model, optimizer, loader, sampler, args)
    accuracy = evaluate(model, test_data)
    finish(args, model, group, accuracy, speed)


def train(
    model: nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    loader: DataLoader,
    sampler: DistributedBatchSampler,
    args: argparse.Namespace,
) -> float:
    """Train for `args.epochs` and return the speed in samples per second, all processes together."""
    seconds = 0.0
    with Live("digits", args.epochs * len(loader), is_shown=dist.get_rank() == 0) as live:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # (4) another order in every epoch, the same on all processes
            start = time.perf_counter()
            for images, labels in loader:
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                live.step(epoch + 1, float(loss), samples=args.batch, waited_s=waited_s(model))
            if epoch > 0:  # the first one warms up
                seconds += time.perf_counter() - start
    return (args.epochs - 1) * len(loader) * args.batch / seconds if seconds else 0.0


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images to train on and 360 to test with, the same ones on every process."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    parts = [(images[part], digits.target[part].astype(np.int64)) for part in (order[360:], order[:360])]
    train, test = (TensorDataset([paddle.to_tensor(array) for array in part]) for part in parts)
    return train, test


def build_model() -> nn.Layer:
    """Return a small convolutional network, designed so that 1 and N processes can be compared by weight.

    It has no batch normalisation and no dropout: with those, the result of one process for a batch is not the
    mean of the results of several processes for its parts. Nor has it units with a kink (ReLU, max pooling):
    a difference in the last bit can switch such a unit on or off, and grow to 1e-2 in the weights. Smooth
    units keep the difference near 1e-6.
    """
    return nn.Sequential(
        nn.Conv2D(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2D(32, 64, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2D(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.GELU(),
        nn.Linear(128, 10),
    )


def evaluate(model: nn.Layer, data: TensorDataset) -> float:
    """Return the fraction of the test images that the model classifies correctly."""
    images, labels = data.tensors
    with paddle.no_grad():
        return float((model(images).argmax(1) == labels).astype("float32").mean())


def finish(args: argparse.Namespace, model: nn.Layer, group: Any, accuracy: float, speed: float) -> None:
    """Print the result, and write the files that the options ask for."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    are_identical = replicas_are_identical(weights, args.ddp, group)
    if dist.get_rank() > 0:
        return
    replicas = ""
    if dist.get_world_size() > 1:
        replicas = f", replicas {'bit-identical' if are_identical else 'DIFFERENT'}"
    print(f"test accuracy {accuracy:.4f}, {speed:,.0f} samples/s{replicas}", flush=True)
    if args.save:
        np.savez(args.save, **weights)
    if args.report:
        report = {"accuracy": accuracy, "samples_per_s": speed, "replicas_are_identical": are_identical}
        args.report.write_text(json.dumps(report))


def replicas_are_identical(weights: dict[str, np.ndarray], ddp: str, group: Any) -> bool:
    """Return whether every process has exactly the same weights, by comparing their SHA-256."""
    if dist.get_world_size() == 1:
        return True
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights.values())).digest()
    mine = np.frombuffer(digest, np.uint8).astype(np.int32)
    if ddp == "paddle":
        gathered: list[paddle.Tensor] = []
        dist.all_gather(gathered, paddle.to_tensor(mine))
        everyones = [other.numpy() for other in gathered]
    else:
        everyones = list(group.all_gather(mine))
    return all(np.array_equal(mine, other) for other in everyones)


def parse_arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--ddp", choices=("paceline", "paddle"), default="paceline")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=48, help="samples of one step, all processes together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="write the weights")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write accuracy and speed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
