"""One rank of a bench: training steps of one model in several ways, in interleaved rounds.

    RANK=0 WORLD_SIZE=1 ... python -m tests.gpu.steps --model cnn --backend nccl --result cnn.json

All ways live in one process and over one process group, so that they meet the same moments of the GPU. First
the curves of the loss are compared, then steps are timed. `step` is the time until the device has finished,
`host` the time until Python has handed all its work to the device: where the two are equal, something in a
step waits for the device. Rank 0 writes what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.bench.rounds import iterations_for
from paceline.torch import DistributedDataParallel
from tests.gpu.models import TASKS, Task

ALONE, INCUMBENT = "alone", "torch"
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    ALONE: lambda module: module,
    INCUMBENT: TorchDDP,
    "torch_view": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "paceline": DistributedDataParallel,
    "paceline_view": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    # A single rank has nothing to average, and leaves it out. With a weight it goes all the way.
    "paceline_all_the_way": lambda module: DistributedDataParallel(module, weight=1.0),
    "paceline_view_all_the_way": lambda module: DistributedDataParallel(
        module, weight=1.0, gradient_as_bucket_view=True
    ),
}


class Way:
    """A model in training, wrapped in one way.

    Args:
        key: Of WAYS.
        task: What is trained.
        device: Where.
        small: Whether in its small form.
        rank: This rank; "alone" trains on its own batches, too.
        adam: Train with Adam instead of plain SGD.
    """

    def __init__(self, key: str, task: Task, device: str, small: bool, rank: int, *, adam: bool) -> None:
        self._task, self._device, self._small, self._rank = task, device, small, rank
        self._kind = device.partition(":")[0]
        self.module = WAYS[key](task.seeded(device, small))
        parameters = self.module.parameters()
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(parameters, lr=1e-3) if adam else torch.optim.SGD(parameters, lr=1e-4)
        )
        self._batch = task.batch_of(rank, 0, device, small)

    def step(self) -> Tensor:
        """One step on the batch at hand; its loss, on the device."""
        inputs, targets = self._batch
        self._optimizer.zero_grad()
        with torch.autocast(self._kind, torch.bfloat16, enabled=self._task.autocast):
            loss = self._task.loss(self.module(inputs), targets)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def losses(self, count: int) -> list[float]:
        """The losses of so many steps, each on a batch of its own."""
        found = []
        for step in range(count):
            self._batch = self._task.batch_of(self._rank, step, self._device, self._small)
            found.append(self.step())
        return torch.stack(found).double().tolist()

    def time(self, iterations: int) -> tuple[float, float]:
        """Seconds of a step until the device is done, and until the host is."""
        synchronize(self._kind)
        begun = time.perf_counter()
        for _ in range(iterations):
            self.step()
        handed = time.perf_counter()
        synchronize(self._kind)
        return (time.perf_counter() - begun) / iterations, (handed - begun) / iterations


def synchronize(kind: str) -> None:
    """Wait for the device."""
    if kind == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def reproducible(kind: str) -> Iterator[None]:
    """Within it, the kernels of a GPU that add in any order are not used, where there are others."""
    benchmark, tf32 = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, tf32


def curves(
    ways: list[str], task: Task, device: str, small: bool, rank: int, steps: int
) -> dict[str, list[float]]:
    """The curve of the loss of each way, one model after the other; this rank's."""
    found = {}
    with reproducible(device.partition(":")[0]):
        for key in ways:
            found[key] = Way(key, task, device, small, rank, adam=True).losses(steps)
            dist.barrier()
    return found


def largest_difference(one: list[float], other: list[float]) -> float:
    """Of two curves, step by step, as a part of the loss."""
    return max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(one, other, strict=True))


def samples(
    ways: list[str], task: Task, device: str, small: bool, rank: int, rounds: int, sample_s: float
) -> dict[str, Any]:
    """The times of steps: a sample of each way in each round, in turn."""
    contenders = {key: Way(key, task, device, small, rank, adam=False) for key in ways}
    for way in contenders.values():
        way.time(3)  # kernels are chosen, memory and buckets settle
    iterations = _agreed(iterations_for(contenders[ALONE].time(2)[0], sample_s, at_most=200))
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in ways}
    for number in range(rounds):
        turn = number % len(ways)
        for key in ways[turn:] + ways[:turn]:
            dist.barrier()
            times[key].append(contenders[key].time(iterations))
    parameters = sum(p.numel() for p in contenders[ALONE].module.parameters())
    return {"iterations": iterations, "parameters": parameters, "times": times}


def _agreed(number: int) -> int:
    """Rank 0's number, so that all ranks make as many steps."""
    told = [number]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=TASKS, required=True)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a trial")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sample-s", type=float, default=0.15, help="seconds that a sample takes at least")
    parser.add_argument("--losses", type=int, default=20, help="steps of which the losses are compared")
    parser.add_argument("--small", action="store_true", help="small forms of the models")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first call of cuBLAS
    device, options = given.device, {}
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        if given.backend == "nccl":
            options = {"device_id": torch.device(device)}
    else:
        torch.set_num_threads(1)
    dist.init_process_group(given.backend, **options)
    ways, task = given.ways.split(","), TASKS[given.model]
    common = (ways, task, device, given.small, rank)
    found: dict[str, Any] = {
        "model": given.model,
        "backend": given.backend,
        "world_size": world_size,
        "losses": curves(*common, given.losses),
        **samples(*common, given.rounds, given.sample_s),
    }
    told: list[Any] = [None] * world_size
    dist.all_gather_object(told, {name: found[name] for name in ("losses", "times")})
    if rank == 0:
        of_rank = {key: [each["times"][key] for each in told] for key in ways}
        found["steps_s"] = {key: [[step for step, _ in row] for row in rows] for key, rows in of_rank.items()}
        found["hosts_s"] = {key: [[host for _, host in row] for row in rows] for key, rows in of_rank.items()}
        found["differences"] = {
            key: max(largest_difference(each["losses"][key], each["losses"][INCUMBENT]) for each in told)
            for key in ways
        }
        del found["times"]
        given.result.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
