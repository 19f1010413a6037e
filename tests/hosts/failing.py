"""Trains until something goes wrong, and tells when and what: `failing.py WHAT PATH`.

Rank 3 is killed, or raises, where WHAT says so; else somebody outside does something, or was wrong from the
start. PATH is what `reduce_through` takes; with "torch", torch's own DDP trains. Each rank prints lines of an
event and the time, of a clock that all hosts share, and the error behind the last one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import DistributedDataParallel, init_process_group

GUILTY = 3
WARM_STEPS = 3
PAUSED_STEPS = 400
"""About 4 s of steps, in which somebody pauses a rank for one."""
NOTICED = 7
"""Exit status of a rank that raised because of another."""


def say(event: str, text: str = "") -> None:
    print(f"{event} {time.monotonic():.3f}\n{text}", end="", flush=True)


def main() -> None:
    what, path = sys.argv[1:]
    torch.set_num_threads(1)
    form = dist.init_process_group if what == "torch forms the group" else init_process_group
    form("gloo", timeout=timedelta(seconds=90))
    rank = dist.get_rank()
    model: nn.Module
    if path == "torch":
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    else:
        model = ours = DistributedDataParallel(nn.Linear(64, 64), reduce_through=path, timeout_s=60)
        assert ours.gradient_path == ("hosts" if path == "auto" else "group")
    x = torch.ones(4, 64)
    failure = RuntimeError if path == "torch" else PacelineError  # all that torch raises
    step = 0
    try:
        while what != "pause" or step < PAUSED_STEPS:
            model.zero_grad()
            model(x).square().mean().backward()
            time.sleep(0.01)
            step += 1
            if step == WARM_STEPS:
                say("warm")
            if step == 2 * WARM_STEPS and rank == GUILTY:
                if what == "kill":
                    say("guilty")
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "raise":
                    say("guilty")
                    raise ValueError("the cause")
    except failure as error:
        say("noticed", f"{error}\n")
        if path == "torch":
            os._exit(NOTICED)  # Gloo's threads would abort the process at its end
        sys.exit(NOTICED)
    say("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
