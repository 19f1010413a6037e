"""The first part of a check: every branch of start-up, one rank, one backward each; seconds.

RANK=0 WORLD_SIZE=1 ... python -m tests.gpu.first --device cuda

It prints each branch before it begins it, so that the last line before a crash names the branch. torch is
imported before Paceline, as users do; conflicts between the C++ runtimes of the core and of torch show then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn


@contextlib.contextmanager
def branch(words: str) -> Iterator[None]:
    """Print that this branch has begun, and how long the last one took."""
    print(f"-- {words} ...", flush=True)
    begun_s = time.monotonic()
    yield
    print(f"   {time.monotonic() - begun_s:.1f} s", flush=True)


def check_backward(device: str, **options: object) -> None:
    """Check that one backward of a wrapped model, buffers included, gives the same as the model alone."""
    from tests.gpu.ways import all_the_way

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)

    alone = model()
    wrapped = all_the_way(model(), **options)
    inputs = torch.randn(16, 8).to(device)
    for each in (alone, wrapped):
        torch.autograd.backward(each(inputs).square().mean())
    ours, theirs = ([p.grad for p in each.parameters()] for each in (wrapped, alone))
    for one, other in zip(ours, theirs, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    kind = parser.parse_args().device
    print(f"torch {torch.__version__} is imported", flush=True)
    with branch("load the core"):
        from paceline import _core
    print(f"   {_core.__file__}", flush=True)
    with branch("read the limits of control groups"):
        limits = _core.cgroup_limits()
    print(f"   memory and cores: {limits}", flush=True)
    with branch("create a region, and form a group of one rank in it"):
        import paceline

        with paceline.init(rank=0, world_size=1, name="first") as group:
            group.barrier()
    from tests.gpu import device as devices

    with branch("form a group of torch over Gloo"):
        dist.init_process_group("gloo")
        dist.barrier()
    with branch(f"begin to use {kind}"):
        # Before the first backward, for which autograd makes a thread for each device that it knows of.
        device = devices.begin(kind, int(os.environ["RANK"]))
        torch.ones(8, device=device).sum().item()
    with branch("a backward on the CPU, through memory"):
        check_backward("cpu", reduce_through="memory")
    with branch("a backward on the CPU, over the group"):
        check_backward("cpu", reduce_through="group")
    if kind != "cpu":
        with branch(f"form a group of torch over NCCL for {device}"):
            over_nccl = dist.new_group(backend=devices.engine(kind, "nccl"))
            dist.all_reduce(torch.ones(8, device=device), group=over_nccl)
            devices.synchronize(kind)
        for view in (False, True):
            with branch(f"a backward on {device}{', with bucket views' if view else ''}"):
                check_backward(device, process_group=over_nccl, gradient_as_bucket_view=view)
                devices.synchronize(kind)
    dist.destroy_process_group()
    print("all branches of start-up: ok", flush=True)


if __name__ == "__main__":
    main()
