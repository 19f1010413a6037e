"""The device of a program of the check: a GPU ("cuda"), the test device ("later"), or the CPU ("cpu").

device = begin("cuda", rank)        that of this rank, which is the current one from then on
engine("cuda", "nccl")              the backend of a process group for its tensors
synchronize("cuda")
launches("cuda", step, 3)           kernels and copies that a step gives to it
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.device import torch as stand_in

KINDS = ("cuda", stand_in.NAME, "cpu")
_LAUNCHES = re.compile(
    # The launch calls of CUDA's and HIP's runtimes and drivers; and of the test device.
    r"(?:cuda|cu|hip)\w*(?:Launch\w*Kernel|LaunchKernel|GraphLaunch|Memcpy\w*Async|Memset\w*Async)\w*"
    rf"|{stand_in.LAUNCH}"
)
_COLLECTIVE = re.compile(r"(gloo|nccl):\w+")


def begin(kind: str, rank: int) -> str:
    """Make a rank's device the current one; return its name, as torch spells it."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return kind
    if kind == stand_in.NAME:
        stand_in.begin()
        torch.set_num_threads(1)
    module = torch.get_device_module(kind)
    index = rank % module.device_count()
    module.set_device(index)
    return f"{kind}:{index}"


def engine(kind: str, backend: str) -> str:
    """The backend for `init_process_group`, from "nccl" or "gloo", for tensors of this device."""
    if kind != stand_in.NAME:
        return backend
    return stand_in.NCCL if backend == "nccl" else stand_in.GLOO


def synchronize(kind: str) -> None:
    """Wait for the device."""
    if kind != "cpu":
        torch.get_device_module(kind).synchronize()


@dataclass(frozen=True)
class Calls:
    """The work that one step launches.

    Attributes:
        launches: Kernels and copies that are given to the device; None on a CPU.
        collectives: Calls of torch's process groups; not of that of the test device.
    """

    launches: float | None
    collectives: float


def count_calls(kind: str, step: Callable[[], object], steps: int) -> Calls:
    """Count over some steps with torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    synchronize(kind)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        synchronize(kind)
    events: Any = profile.events()
    names = [event.name for event in events]
    launches = sum(_LAUNCHES.fullmatch(name) is not None for name in names) / steps
    collectives = sum(_COLLECTIVE.fullmatch(name) is not None for name in names) / steps
    return Calls(None if kind == "cpu" else launches, collectives)
