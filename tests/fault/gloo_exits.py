"""Measures how ranks of a torch Gloo group end when Gloo's threads run late.

python -m tests.fault.gloo_exits --exits 200                   # with Paceline's DDP
python -m tests.fault.gloo_exits --exits 200 --wait-s 0        # without its wait at the exit
python -m tests.fault.gloo_exits --exits 200 --subject torch   # with torch's, without Paceline

A thread of Gloo releases the tensors of the last collective only after the program has its result. If the
interpreter has begun to end by then, Python 3.13 and older end that thread in a way that aborts the process
(pytorch#190489). Here these threads are `SCHED_IDLE` and share one core with the rest of their rank, so they
run only when the rest leaves that core idle. Ranks are forks of a process that has imported torch, and run to
the end of the interpreter. Prints how many had which exit status, as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # once, for all forks: optimizers and torch's DDP import it
import torch.distributed as dist
from torch import nn

WORLD_SIZE = 2
_JOBS_AT_ONCE = 2


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--exits", type=int, default=200, help="how many ranks end (default: %(default)s)")
    parser.add_argument("--subject", choices=("paceline", "torch"), default="paceline")
    parser.add_argument("--ending", choices=ENDINGS, default="destroyed", help="what a rank does last")
    parser.add_argument("--wait-s", type=float, help="how long Paceline waits for Gloo's threads at most")
    args = parser.parse_args()
    if args.subject == "paceline":
        from paceline.torch.communicator import gloo_threads  # once, for all forks

        gloo_threads.LONGEST_S = gloo_threads.LONGEST_S if args.wait_s is None else args.wait_s
    gc.freeze()  # otherwise each fork copies the pages that the end of the interpreter visits
    statuses: list[int] = []
    while len(statuses) < args.exits:
        statuses += _run_jobs(args)
    print(json.dumps({str(status): statuses.count(status) for status in sorted(set(statuses))}))


def _run_jobs(args: argparse.Namespace) -> list[int]:
    """The exit statuses of the ranks of some jobs."""
    folder = Path(tempfile.mkdtemp(prefix="gloo-exits-"))
    pids = []
    for job in range(_JOBS_AT_ONCE):
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                _train(rank, folder / f"store-{job}", args)
                sys.exit(0)  # through the end of the interpreter
            pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    shutil.rmtree(folder)  # a TemporaryDirectory would be removed in the forks, too
    return statuses


def _train(rank: int, store: Path, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"PACELINE_JOB_ID": f"{store.parent.name}-{store.name}"}
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=120),
    )
    model = _wrap(nn.Linear(64, 64), args.subject)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _starve_gloo(rank)
    ENDINGS[args.ending](rank)


def _wrap(model: nn.Module, subject: str) -> nn.Module:
    if subject == "torch":
        return nn.parallel.DistributedDataParallel(model)
    from paceline.torch import DistributedDataParallel

    return DistributedDataParallel(model)


def _starve_gloo(rank: int) -> None:
    """Put all threads of this rank on one core, those of Gloo at idle priority."""
    cores = sorted(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {cores[rank % len(cores)]})
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def _gather() -> None:
    """The last collective of examples/digits.py."""
    mine = torch.ones(32, dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(everyones, mine)


def _destroyed(rank: int) -> None:
    _gather()
    dist.destroy_process_group()


def _kept(rank: int) -> None:
    _gather()


def _unawaited(rank: int) -> None:
    """A collective whose result is never waited for, on a group that is kept."""
    dist.all_reduce(torch.ones(1000), async_op=True)


def _raised(rank: int) -> None:
    """One rank raises, and leaves the others in a collective."""
    if rank == 1:
        raise SystemExit(3)
    try:
        _gather()
    except RuntimeError:
        sys.exit(3)


ENDINGS: dict[str, Callable[[int], None]] = {
    "destroyed": _destroyed,
    "kept": _kept,
    "unawaited": _unawaited,
    "raised": _raised,
}

if __name__ == "__main__":
    main()
