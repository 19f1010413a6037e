"""One rank of a measurement: every variant of averaging in turn, round by round, in the same processes.

Before it times any variant, it checks that all give the right gradients, with the same bits on all ranks.
Rank 0 writes the results as JSON to the file RESULT. The model is on the CPU, or, if PACELINE_TEST_DEVICE is
set, on the stand-in for a GPU of `tests/device`, with process groups that match it.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.torch import DistributedDataParallel
from tests import accelerator
from tests.hosts.measured import (
    ALONE,
    COMPRESSED,
    ITEM_BYTES,
    NUM_LAYERS,
    Arguments,
    measure,
    report,
    width_of,
)

PLACE = torch.device(accelerator.KIND, 0) if accelerator.IS_THERE else torch.device("cpu")

WAYS = ("torch", "group", "hosts")
"""torch's DDP over Gloo; Paceline's over Gloo alone; Paceline's in the memory of each host first."""
EXACT = "exact"
"""Like hosts, with deterministic="world"."""


def model_of(nbytes: int, dtype: str = "float32") -> nn.Module:
    """Layers whose parameters take about `nbytes` together."""
    torch.manual_seed(0)
    width = width_of(nbytes, dtype)
    layers = [nn.Linear(width, width, dtype=getattr(torch, dtype)) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers).to(PLACE)


def wrapped(way: str, nbytes: int, dtype: str = "float32") -> nn.Module:
    """The model as this variant wraps it."""
    if way == ALONE:
        return model_of(nbytes, dtype)
    if way == "torch":
        return TorchDDP(model_of(nbytes, dtype))
    compression = way if way in COMPRESSED else None
    model = DistributedDataParallel(
        model_of(nbytes, dtype),
        reduce_through="group" if way == "group" else "auto" if PLACE.type == "cpu" else "hosts",
        compress_between_hosts=compression,
        deterministic="world" if way == EXACT else None,
    )
    assert model.gradient_path == ("group" if way == "group" else "hosts"), model.gradient_path
    return model


def batch(rank: int, model: nn.Module) -> torch.Tensor:
    """The batch of a rank, the same in every process."""
    weight = next(model.parameters())
    found = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(1 + rank))
    return found.to(weight)


def backward(model: nn.Module, x: torch.Tensor) -> None:
    """Compute the gradients of one step."""
    model.zero_grad()
    model(x).square().mean().backward()
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)


def check(way: str, model: nn.Module, rank: int, world_size: int, nbytes: int, dtype: str) -> str:
    """Compare gradients with those of one process in float64; return their digest."""
    if way == ALONE:
        return ""
    plain = model_of(nbytes, dtype).cpu().double()
    is_rough = way in COMPRESSED or dtype != "float32"
    losses = [plain(batch(each, plain)).square().mean() for each in range(world_size)]
    torch.stack(losses).mean().backward()
    # Buckets change after the first step. Compressed gradients are right on average; topk's after many steps.
    num_steps = {"topk": 64}.get(way, 3)
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    for _ in range(num_steps):
        backward(model, batch(rank, model))
        for each, p in zip(sums, model.parameters()):
            each += p.grad.cpu()
    for each, found, expected in zip(sums, model.parameters(), plain.parameters()):
        assert found.grad is not None and expected.grad is not None
        if is_rough:
            lost = (each / num_steps - expected.grad).norm() / expected.grad.norm()
            assert lost < (0.6 if way == "topk" else 0.05), (way, lost)
        else:
            torch.testing.assert_close(found.grad.cpu().double(), expected.grad, rtol=1e-4, atol=1e-6)
    grads = b"".join(
        p.grad.cpu().view(torch.uint8).numpy().tobytes() for p in model.parameters() if p.grad is not None
    )
    digests: list[object] = [None] * world_size
    dist.all_gather_object(digests, hashlib.sha256(grads).hexdigest()[:12])
    assert len(set(digests)) == 1, digests
    return str(digests[0])


def slowest(seconds: float) -> float:
    """The longest time over all ranks."""
    longest = torch.tensor([seconds])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def main() -> None:
    arguments = Arguments.given()
    dist.init_process_group("gloo" if PLACE.type == "cpu" else accelerator.GLOO_AND_NCCL)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    size = arguments.nbytes, arguments.dtype
    models = {way: wrapped(way, *size) for way in arguments.ways}
    digests = {way: check(way, model, rank, world_size, *size) for way, model in models.items()}
    first = models[arguments.ways[0]]
    x = batch(rank, first)
    facts = measure(arguments, models, lambda model: backward(model, x), dist.barrier, slowest)
    if rank == 0:
        nbytes = sum(p.numel() for p in first.parameters()) * ITEM_BYTES[arguments.dtype]
        report({**facts, "digests": digests, "nbytes": nbytes})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
