"""One rank of a bench: training steps of one model in several variants, in interleaved rounds.

RANK=0 WORLD_SIZE=1 ... python -m tests.gpu.steps --model cnn --backend nccl --result cnn.json

All variants run in one process and over one process group, so that the machine's state is the same for all.
First the curves of the loss are compared, then steps are timed. `step` is the time until the device has
finished, `host` the time until Python has handed all its work to the device: if the two are equal, something
in a step waits for the device. Then torch's profiler counts the launches of a step. Rank 0 writes the
results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.samples import iterations_for
from tests.gpu import device as devices
from tests.gpu.models import FORMS, TASKS, Task
from tests.gpu.ways import ALONE, INCUMBENT, WAYS, here

_PROFILED_STEPS = 2


@dataclass(frozen=True)
class Job:
    """The training, and its device; the same in all variants.

    Attributes:
        task: Of TASKS.
        form: Of FORMS.
        device: As torch spells it.
        rank: This rank; "alone" trains on its own batches, too.
        is_compiled: Whether torch.compile gets the model, wrapped.
    """

    task: Task
    form: str
    device: str
    rank: int
    is_compiled: bool = False

    @property
    def kind(self) -> str:
        """The kind of the device."""
        return self.device.partition(":")[0]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of this rank in a step."""
        return self.task.batch_of(self.rank, step, self.device, self.form)


class Way:
    """A model in training, in one variant.

    Args:
        key: Of WAYS.
        job: The training.
        optimizer: Its class; None: a step is a forward and a backward alone.
        rate: The optimizer's learning rate.
    """

    def __init__(
        self, key: str, job: Job, optimizer: type[torch.optim.Optimizer] | None, rate: float = 1e-4
    ) -> None:
        self._job = job
        self.module = WAYS[key](job.task.seeded(job.device, job.form))
        self._parameters = list(self.module.parameters())
        self._run = torch.compile(self.module) if job.is_compiled else self.module
        self._optimizer = optimizer and optimizer(self._parameters, lr=rate)  # type: ignore[call-arg]
        self._uses_autocast = job.task.autocast and job.form != "tiny"
        self._batch = job.batch(0)

    def step(self) -> Tensor:
        """Make one step on the present batch; return its loss, on the device."""
        inputs, targets = self._batch
        for parameter in self._parameters:
            parameter.grad = None
        with torch.autocast(self._job.kind, torch.bfloat16) if self._uses_autocast else _NOTHING:
            loss = self._job.task.loss(self._run(inputs), targets)
        torch.autograd.backward(loss)
        if self._optimizer is not None:
            self._optimizer.step()
        return loss.detach()

    def losses(self, count: int) -> list[float]:
        """The losses of so many steps, each on a new batch."""
        found = []
        for step in range(count):
            self._batch = self._job.batch(step)
            found.append(self.step())
        return [float(loss) for loss in torch.stack(found).cpu()]

    def time(self, iterations: int) -> tuple[float, float]:
        """Seconds of a step until the device is done, and until the host is."""
        devices.synchronize(self._job.kind)
        begun = time.perf_counter()
        for _ in range(iterations):
            self.step()
        handed = time.perf_counter()
        devices.synchronize(self._job.kind)
        return (time.perf_counter() - begun) / iterations, (handed - begun) / iterations


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """A context without those kernels of a GPU that add in any order, as far as there are others."""
    benchmark, tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32


def curves(ways: list[str], job: Job, steps: int) -> dict[str, list[float]]:
    """The curve of the loss of each variant on this rank, one model after the other."""
    found = {}
    with reproducible():
        for key in ways:
            found[key] = Way(key, job, torch.optim.Adam, 1e-3).losses(steps)
            dist.barrier()
    return found


def largest_difference(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves at a step, relative to the loss."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(one, other, strict=True))


def samples(ways: list[str], job: Job, rounds: int, sample_s: float, *, steps: bool) -> dict[str, Any]:
    """The times of steps, a sample of each variant in each round, in turn; and the launches of a step.

    Args:
        ways: Of WAYS.
        job: The training.
        rounds: Samples of each variant.
        sample_s: Seconds that one takes.
        steps: Whether the optimizer makes its step, too.
    """
    optimizer = torch.optim.SGD if steps else None
    trained = {key: Way(key, job, optimizer) for key in ways}
    for way in trained.values():
        way.time(3)  # kernels are chosen, memory and buckets settle
    iterations = _agreed(iterations_for(trained[ALONE].time(2)[0], sample_s, at_most=200))
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in ways}
    for number in range(rounds):
        turn = number % len(ways)
        for key in ways[turn:] + ways[:turn]:
            dist.barrier()
            times[key].append(trained[key].time(iterations))
    calls = {}
    for key, way in trained.items():
        dist.barrier()
        calls[key] = devices.count_calls(job.kind, way.step, _PROFILED_STEPS)
    sizes = [parameter.numel() for parameter in trained[ALONE].module.parameters()]
    return {
        "iterations": iterations,
        "parameters": sum(sizes),
        "tensors": len(sizes),
        "buffers": len(list(trained[ALONE].module.buffers())),
        "launches": {key: each.launches for key, each in calls.items()},
        "collectives": {key: each.collectives for key, each in calls.items()},
        "times": times,
    }


def _agreed(number: int) -> int:
    """Rank 0's number, so that all ranks make as many steps."""
    gathered = [number]
    dist.broadcast_object_list(gathered, src=0)
    return gathered[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=TASKS, required=True)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda", choices=devices.KINDS)
    parser.add_argument("--ways", default="", help="default: all that this torch has")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sample-s", type=float, default=0.15, help="seconds that a sample takes at least")
    parser.add_argument("--losses", type=int, default=20, help="steps of which the losses are compared")
    parser.add_argument("--form", default="whole", choices=FORMS)
    parser.add_argument("--no-optimizer", action="store_true", help="time forward and backward alone")
    parser.add_argument("--compile", action="store_true", help="of all ways")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
    device = devices.begin(given.device, rank)
    options: dict[str, Any] = {}
    if given.device == "cuda" and given.backend == "nccl":
        options = {"device_id": torch.device(device)}
    dist.init_process_group(devices.engine(given.device, given.backend), **options)
    ways = given.ways.split(",") if given.ways else here()
    job = Job(TASKS[given.model], given.form, device, rank, given.compile)
    found: dict[str, Any] = {
        "model": f"{given.model}, compiled" if given.compile else given.model,
        "backend": given.backend,
        "world_size": world_size,
        "losses": curves(ways, job, given.losses),
        **samples(ways, job, given.rounds, given.sample_s, steps=not given.no_optimizer),
    }
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, {name: found[name] for name in ("losses", "times")})
    if rank == 0:
        of_rank = {key: [each["times"][key] for each in gathered] for key in ways}
        found["steps_s"] = {key: [[step for step, _ in row] for row in rows] for key, rows in of_rank.items()}
        found["hosts_s"] = {key: [[host for _, host in row] for row in rows] for key, rows in of_rank.items()}
        found["differences"] = {
            key: max(largest_difference(each["losses"][key], each["losses"][INCUMBENT]) for each in gathered)
            for key in ways
        }
        del found["times"]
        given.result.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
