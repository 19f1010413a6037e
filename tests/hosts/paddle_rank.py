"""One rank of a measurement with Paddle; see `rank`, which does the same with torch."""

from __future__ import annotations

import hashlib

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

import paceline.paddle
from tests.hosts.measured import COMPRESSED, NUM_LAYERS, Arguments, measure, report, width_of

WAYS = ("paddle", "group", "hosts")
"""paddle.DataParallel over Gloo; Paceline's over Gloo alone; Paceline's in the memory of each host first."""


def model_of(nbytes: int) -> nn.Layer:
    """Layers whose parameters take about `nbytes` together."""
    paddle.seed(0)
    width = width_of(nbytes)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(NUM_LAYERS)])


def wrapped(way: str, nbytes: int) -> nn.Layer:
    """The model as this variant wraps it."""
    if way == "paddle":
        return paddle.DataParallel(model_of(nbytes))
    model = paceline.paddle.DataParallel(
        model_of(nbytes),
        reduce_through="group" if way == "group" else "auto",
        compress_between_hosts=way if way in COMPRESSED else None,
    )
    assert model.gradient_path == ("group" if way == "group" else "hosts"), model.gradient_path
    return model


def batch(rank: int, model: nn.Layer) -> np.ndarray:
    """The batch of a rank, the same in every process."""
    width = model.parameters()[0].shape[0]
    return np.random.default_rng(1 + rank).standard_normal((4, width)).astype(np.float32)


def backward(model: nn.Layer, x: paddle.Tensor) -> None:
    """Compute the gradients of one step."""
    model.clear_gradients()
    (model(x) ** 2).mean().backward()


def in_one_process(nbytes: int, world_size: int) -> list[np.ndarray]:
    """The gradients of all ranks' batches together, computed with numpy in float64."""
    plain = model_of(nbytes)
    values = [parameter.numpy().astype(np.float64) for parameter in plain.parameters()]
    weights, biases = values[::2], values[1::2]
    inputs = [np.concatenate([batch(rank, plain) for rank in range(world_size)]).astype(np.float64)]
    for weight, bias in zip(weights, biases, strict=True):
        inputs.append(inputs[-1] @ weight + bias)
    upstream, found = 2 * inputs[-1] / inputs[-1].size, []
    for weight, entry in zip(weights[::-1], inputs[-2::-1], strict=True):
        found += [upstream.sum(0), entry.T @ upstream]
        upstream = upstream @ weight.T
    return found[::-1]


def check(way: str, model: nn.Layer, rank: int, world_size: int, nbytes: int) -> str:
    """Compare gradients with those of one process; return their digest."""
    x = paddle.to_tensor(batch(rank, model))
    num_steps = {"topk": 64}.get(way, 3)  # buckets change after the first; int8 and topk are right on average
    means = [np.zeros(p.shape) for p in model.parameters()]
    for _ in range(num_steps):
        backward(model, x)
        for mean, p in zip(means, model.parameters(), strict=True):
            mean += p.grad.numpy() / num_steps
    for mean, expected in zip(means, in_one_process(nbytes, world_size), strict=True):
        lost = np.linalg.norm(mean - expected) / np.linalg.norm(expected)
        assert lost < {"topk": 0.6}.get(way, 0.05 if way in COMPRESSED else 1e-4), (way, lost)
    grads = b"".join(p.grad.numpy().tobytes() for p in model.parameters())
    digests: list[str] = []
    dist.all_gather_object(digests, hashlib.sha256(grads).hexdigest()[:12])
    assert len(set(digests)) == 1, digests
    return digests[0]


def slowest(seconds: float) -> float:
    """The longest time over all ranks."""
    longest = paddle.to_tensor([seconds])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest[0])


def main() -> None:
    arguments = Arguments.given()
    paceline.paddle.init_parallel_env()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    models = {way: wrapped(way, arguments.nbytes) for way in arguments.ways}
    digests = {way: check(way, model, rank, world_size, arguments.nbytes) for way, model in models.items()}
    first = models[arguments.ways[0]]
    x = paddle.to_tensor(batch(rank, first))
    facts = measure(arguments, models, lambda model: backward(model, x), dist.barrier, slowest)
    if rank == 0:
        report({**facts, "digests": digests, "nbytes": sum(int(p.size) for p in first.parameters()) * 4})
    dist.barrier()


if __name__ == "__main__":
    main()
