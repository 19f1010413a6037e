"""A script that trains over several hosts while a test watches it: rank SLOW_RANK is slow in each step.

`watched.py FOLDER SLOW_RANK`: trains until there is a file FOLDER/stop; all ranks stop in the same step.
A rank kills itself if there is a file FOLDER/die-RANK.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.torch import DistributedDataParallel, init_process_group


def main() -> None:
    folder, slow_rank = Path(sys.argv[1]), int(sys.argv[2])
    init_process_group("gloo")
    rank = dist.get_rank()
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    while True:
        if (folder / f"die-{rank}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.04 if rank == slow_rank else 0.002)
        loss = ddp(torch.ones(4, 8)).square().mean()
        loss.backward()
        paceline.log("loss", loss.detach())
        is_over = torch.tensor([(folder / "stop").exists()], dtype=torch.int32)
        dist.all_reduce(is_over)
        if is_over:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
