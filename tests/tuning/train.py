"""A typical training script of a user, with three models. The ranks divide each batch among themselves.

After `--seconds` it ends, and reports its rate by its own clock and its own count of steps.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

from paceline.torch import DistributedDataParallel


class Reader(nn.Module):
    """Classifies a sequence by the last state of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(rows)[0][:, -1])


MODELS = {
    # name: (model, shape of a sample, samples of a step)
    "policy": (
        lambda: nn.Sequential(
            nn.Linear(17, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
        ),
        (17,),
        128,
    ),
    "dense": (
        lambda: nn.Sequential(
            nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ),
        (1024,),
        256,
    ),
    "gru": (Reader, (32, 8), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--warm-s", type=float, default=1.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    make, shape, global_batch = MODELS[args.model]
    batch = global_batch // dist.get_world_size()
    model = DistributedDataParallel(make())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(16, batch, *shape), torch.randint(10, (16, batch))

    def steps_for(seconds: float) -> tuple[int, float]:
        """Train for this long by rank 0's clock; return the steps and the seconds that they took."""
        steps, begin = 0, time.perf_counter()
        is_over = torch.zeros(1)
        while not is_over.item():
            for at in range(16):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[at]), targets[at]).backward()
                optimizer.step()
            steps += 16
            is_over[0] = time.perf_counter() - begin >= seconds
            dist.broadcast(is_over, 0)
        return steps, time.perf_counter() - begin

    steps_for(args.warm_s)
    steps, seconds = steps_for(args.seconds)
    if dist.get_rank() == 0:
        print("samples per second:", steps * global_batch / seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
