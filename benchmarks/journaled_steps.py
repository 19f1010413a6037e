"""The time that a journal adds to a step of a sharded optimizer, and that of the syncs around a step.

    paceline run -n 2 -m benchmarks.journaled_steps [--millions 8] [--rounds 15] [--syncs-only]

All block sizes are measured in turn. Each figure is a median over rounds: of the slower rank's time, and of
rank 0's processor time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline
from paceline.sharding import journal_layout
from paceline.sharding.step_barriers import Call
from paceline.torch import DistributedDataParallel, ShardedOptimizer

_SYNCS = 500
_MODELS: list[DistributedDataParallel] = []  # kept alive as long as their optimizers


def make(group: Any, millions: int, fused: bool, block_kib: int) -> ShardedOptimizer:
    """Return an AdamW of shared parameters with gradients; `block_kib` 0: without a journal."""
    journal_layout.BLOCK_BYTES = max(block_kib, 1) << 10
    model = nn.ParameterList([nn.Parameter(torch.zeros(1000, 1000)) for _ in range(millions)])
    ddp = DistributedDataParallel(model, process_group=group, share_parameters=True)
    for parameter in ddp.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    options: dict[str, Any] = {"lr": 1e-3, "fused": fused, "foreach": not fused}
    optimizer = ShardedOptimizer(
        ddp.parameters(), torch.optim.AdamW, process_group=group, journal=block_kib > 0, **options
    )
    _MODELS.append(ddp)
    return optimizer


def times_ms(group: Any, call: Callable[[], object]) -> tuple[float, float]:
    """Return a call's time on the slower rank, and its processor time on this rank, in milliseconds."""
    group.barrier()
    begin, worked = time.perf_counter(), time.process_time()
    call()
    worked = time.process_time() - worked
    return 1e3 * float(group.all_gather(np.array([time.perf_counter() - begin])).max()), 1e3 * worked


def syncs(group: Any, optimizer: ShardedOptimizer) -> tuple[float, float]:
    """Return the microseconds of the syncs before and after a step of idle ranks; the minimum over rounds."""
    steps, has_gradient = optimizer._steps, b"\1" * len(optimizer._shards.parameters)
    before: list[float] = []
    after: list[float] = []
    assert steps._travel is not None
    for _ in range(15):
        for calls, times in (
            (lambda: steps.sync(Call.STEP, has_gradient), before),
            (steps._travel.barrier, after),
        ):
            group.barrier()
            begin = time.perf_counter()
            for _ in range(_SYNCS):
                calls()
            times.append(1e6 * (time.perf_counter() - begin) / _SYNCS)
    return min(before), min(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=8, help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--syncs-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    group = paceline.init()
    optimizers = {0: make(group, 1, fused=False, block_kib=0)}
    optimizers[0].step()
    for fused in () if arguments.syncs_only else (False, True):
        blocks = (0, 256, 1024, 4096)
        optimizers = {block: make(group, arguments.millions, fused, block) for block in blocks}
        times: dict[int, list[tuple[float, float]]] = {block: [] for block in blocks}
        for number in range(arguments.rounds + 2):
            for block, optimizer in optimizers.items():
                taken = times_ms(group, optimizer.step)
                if number >= 2:  # the first ones create the state
                    times[block].append(taken)
        if group.rank == 0:
            plain = [statistics.median(each) for each in zip(*times[0])]
            for block in blocks:
                median = [statistics.median(each) for each in zip(*times[block])]
                name = f"journal, blocks of {block} KiB" if block else "no journal"
                print(
                    f"{'fused' if fused else 'foreach'} AdamW, {arguments.millions} M, {name}: "
                    f"{median[0]:.2f} ms ({median[0] / plain[0]:.2f}), "
                    f"processor {median[1]:.2f} ms ({median[1] / plain[1]:.2f})",
                    flush=True,
                )
    before, after = syncs(group, optimizers[0])
    if group.rank == 0:
        print(f"sync before a step {before:.2f} us, after it {after:.2f} us")


if __name__ == "__main__":
    main()
