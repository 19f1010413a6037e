"""Training on handwritten digits with fewer bytes between hosts, compared with full gradients in each step.

python -m tests.hosts.convergence --epochs 8 --seeds 3                       # compressed gradients
python -m tests.hosts.convergence --what local_sgd --optimizer adamw         # hosts that sync every few steps

The two hosts have one rank each. They are processes of this machine that are configured as hosts, because
convergence does not depend on the speed of the link. The data are scikit-learn's copy of the UCI digits, so
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import NonFiniteGradientError
from paceline.torch import DistributedDataParallel, LocalSGD
from paceline.torch.communicator.hosts import GlooTransport
from tests.harness import run_ranks
from tests.hosts.measured import COMPRESSED
from tests.several_hosts import be_on_host, noting

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from digits import build_model, evaluate, load_data

COMPRESSION: dict[str, dict[str, Any]] = {
    str(way): {"compress_between_hosts": way} for way in (None, *COMPRESSED)
}
LOCAL_SGD: dict[str, dict[str, Any]] = {"gradients in each step": {}}
for every in (1, 8, 32):
    averaging = LocalSGD(every, outer_lr=1, outer_momentum=0)
    LOCAL_SGD[f"parameters averaged, every={every}"] = {"local_sgd": averaging}
for every in (1, 8, 32):
    LOCAL_SGD[f"outer 0.7 and 0.9, every={every}"] = {"local_sgd": LocalSGD(every)}
LOCAL_SGD["outer 0.7 and 0.9, every=32, int8"] = {"local_sgd": LocalSGD(32), "compress_between_hosts": "int8"}
WAYS = {"compression": COMPRESSION, "local_sgd": LOCAL_SGD}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.002),
}
BATCH = 32


def train(
    rank: int, arguments: dict[str, Any], optimizer_name: str, seed: int, epochs: int
) -> tuple[list[float], float, int]:
    """Mean training loss of each epoch, the final test accuracy, and the bytes that this rank sent."""
    data, test_data = load_data()
    x, y = data.tensors
    torch.manual_seed(seed)
    model = DistributedDataParallel(build_model(), **arguments)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses = []
    _sent.clear()
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        found = []
        for batch in order.split(BATCH):
            mine = batch[rank::2]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(statistics.mean(found))
    if "local_sgd" in arguments:
        model.sync_parameters()
    else:
        model.check_replicas(optimizer)
    sent = sum(_sent)
    return losses, evaluate(model.module, test_data), sent


_sent: list[int] = []


def train_or_diverge(*arguments: Any) -> tuple[list[float], float, int]:
    """Return the result of `train`, or infinite losses if the parameters did not stay finite."""
    try:
        return train(*arguments)
    except NonFiniteGradientError:
        return [math.inf] * 1000, 0.0, 0


def run(rank: int, what: str, optimizer: str, seeds: int, epochs: int) -> dict[str, Any]:
    """Train every variant with every seed."""
    sending = noting(GlooTransport.sending, lambda message, _: _sent.append(message.nbytes))
    GlooTransport.sending = sending  # type: ignore[assignment,method-assign]
    be_on_host(rank)
    return {
        way: [train_or_diverge(rank, arguments, optimizer, seed, epochs) for seed in range(seeds)]
        for way, arguments in WAYS[what].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--what", choices=WAYS, default="compression")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    options = parser.parse_args()
    found = run_ranks(run, 2, vars(options), group="gloo", deadline_s=3600)
    print(
        "| between hosts | loss of epoch 1 | of the middle one | of the last one | test accuracy | MB sent |"
    )
    print("|---|---|---|---|---|---|")
    for way, runs in found[0].items():
        epochs = (0, options.epochs // 2, options.epochs - 1)
        cells = [way, *(f"{statistics.mean(losses[epoch] for losses, *_ in runs):.4f}" for epoch in epochs)]
        rights = sorted(right for _, right, _ in runs)
        cells.append(f"{statistics.mean(rights):.4f} ({rights[0]:.4f}-{rights[-1]:.4f})")
        cells.append(f"{runs[0][2] / 1e6:.1f}")
        if any(math.inf in losses for losses, *_ in runs):
            cells = [way, "diverged", "", "", "", ""]
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
