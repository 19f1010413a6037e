"""One rank of a measurement: every way to average in turn, round by round, in the same processes.

Checks that all ways give the right gradients, the same bits on all ranks, before it times any. Rank 0 prints
one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.torch import DistributedDataParallel

WAYS = ("torch", "group", "hosts")
"""torch's DDP over Gloo; Paceline's over Gloo alone; Paceline's in the memory of each host first."""
COMPRESSED = ("bf16", "fp16", "int8", "topk")
"""As hosts, with compress_between_hosts."""
EXACT = "exact"
"""As hosts, with deterministic="world"."""
_LAYERS = 4


def model_of(nbytes: int) -> nn.Module:
    """Layers whose parameters have together about so many bytes."""
    torch.manual_seed(0)
    width = max(4, round((nbytes / 4 / _LAYERS) ** 0.5))
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(_LAYERS)])


def wrapped(way: str, nbytes: int) -> nn.Module:
    """The model as this way wraps it."""
    if way == "torch":
        return TorchDDP(model_of(nbytes))
    compression = way if way in COMPRESSED else None
    model = DistributedDataParallel(
        model_of(nbytes),
        reduce_through="group" if way == "group" else "auto",
        compress_between_hosts=compression,
        deterministic="world" if way == EXACT else None,
    )
    assert model.gradient_path == ("group" if way == "group" else "hosts"), model.gradient_path
    return model


def batch(rank: int, model: nn.Module) -> torch.Tensor:
    """Of a rank, the same wherever it is made."""
    width = next(model.parameters()).shape[1]
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1 + rank))


def backward(model: nn.Module, x: torch.Tensor) -> None:
    """One step's gradients."""
    model.zero_grad()
    model(x).square().mean().backward()


def check(way: str, model: nn.Module, rank: int, world_size: int, nbytes: int) -> str:
    """Compare gradients with those of one process in float64; their digest."""
    plain = model_of(nbytes).double()
    losses = [plain(batch(each, plain).double()).square().mean() for each in range(world_size)]
    torch.stack(losses).mean().backward()
    # The plan is made anew after the first. Codes are right on average, of topk after many.
    num_steps = {"topk": 64}.get(way, 3)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for _ in range(num_steps):
        backward(model, batch(rank, model))
        for each, p in zip(sums, model.parameters()):
            each += p.grad
    for each, found, expected in zip(sums, model.parameters(), plain.parameters()):
        assert found.grad is not None and expected.grad is not None
        if way in COMPRESSED:
            lost = (each / num_steps - expected.grad).norm() / expected.grad.norm()
            assert lost < (0.6 if way == "topk" else 0.05), (way, lost)
        else:
            torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-6)
    grads = b"".join(p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None)
    digests: list[object] = [None] * world_size
    dist.all_gather_object(digests, hashlib.sha256(grads).hexdigest()[:12])
    assert len(set(digests)) == 1, digests
    return str(digests[0])


def sent() -> int:
    """Bytes that this host has put on its link."""
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())


def main() -> None:
    nbytes, rounds, steps = (int(each) for each in sys.argv[1:4])
    ways = sys.argv[4].split(",")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    models = {way: wrapped(way, nbytes) for way in ways}
    digests = {way: check(way, model, rank, world_size, nbytes) for way, model in models.items()}
    x = batch(rank, models[ways[0]])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent_bytes: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, model in models.items():
            backward(model, x)
            dist.barrier()
            before, started = sent(), time.perf_counter()
            for _ in range(steps):
                backward(model, x)
            took = time.perf_counter() - started
            dist.barrier()
            slowest = torch.tensor([took])
            sent_bytes[way].append((sent() - before) / steps)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[way].append(float(slowest) / steps)
    if rank == 0:
        parameters = sum(p.numel() for p in models[ways[0]].parameters()) * 4
        facts = {"seconds": seconds, "sent_bytes": sent_bytes, "digests": digests, "nbytes": parameters}
        with open(os.environ["RESULT"], "w") as file:
            json.dump(facts, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
