"""The same script for every launcher: one backward pass over all hosts. Each rank prints one line."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from paceline.torch import DistributedDataParallel, init_process_group


def main() -> None:
    torch.set_num_threads(1)
    init_process_group("gloo", timeout=90)
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), rank + 1.0)).sum().backward()
    (gradient, *_) = model.module.weight.grad.flatten().tolist()  # of rank r: 2 (r + 1)
    place = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    # One write, so that lines of two ranks do not mix.
    print(
        f"rank {rank} of {dist.get_world_size()} on {os.uname().nodename}, place {' of '.join(place)}: "
        f"{gradient:g} by {model.gradient_path}\n",
        end="",
        flush=True,
    )
    dist.barrier()  # rank 0, which serves torch's store, ends last
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
