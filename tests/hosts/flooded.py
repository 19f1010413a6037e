"""One rank, started by `paceline run`, that repeatedly forms groups of every kind and trains.

It prints one line with its results: a digest of all sums and gradients, and the paths of the gradients.
"""

from __future__ import annotations

import hashlib
import os
import warnings

import numpy as np
import torch
import torch.distributed as dist

import paceline
from paceline.torch import DistributedDataParallel

TIMES = 6


def sums_of(group: paceline.Group, seed: int) -> bytes:
    values = np.random.default_rng([seed, group.rank]).standard_normal(1000).astype(np.float32)
    group.all_reduce(values)
    return values.tobytes()


def gradients_of(model: torch.nn.Module, rank: int) -> bytes:
    inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().sum().backward()
    return b"".join(each.grad.numpy().tobytes() for each in model.parameters())


def main() -> None:
    warnings.simplefilter("ignore")
    digest, paths = hashlib.sha256(), set()
    for time in range(TIMES):
        with paceline.init(name=f"group {time}", timeout_s=100) as group:
            digest.update(sums_of(group, time))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for time in range(TIMES):
        torch.manual_seed(time)
        wrapped = DistributedDataParallel(
            torch.nn.Linear(5, 5), share_parameters=time % 2 == 1, timeout_s=100
        )
        digest.update(gradients_of(wrapped, rank))
        paths.add(f"{wrapped.gradient_path} {wrapped.bits}")
    for size in (world_size, 2):
        ranks = list(range(size))
        for _ in range(TIMES):
            ours = dist.new_group(ranks, backend="paceline")
            if rank in ranks:
                values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
                dist.all_reduce(values, group=ours)
                digest.update(values.numpy().tobytes())
    print(f"found {os.environ['RANK']} {digest.hexdigest()} {sorted(paths)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
