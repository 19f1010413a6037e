"""Models with batches from a seed, and the process group, the wrappers and the optimizers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

LIMIT = timedelta(seconds=60)

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
        build: Creates the module; call it under a fixed seed.
        batch: Creates a rank's inputs and targets from a generator seeded with the rank.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def seeded(self) -> nn.Module:
        """Return the module, with the same weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()

    def batch_of(self, rank: int) -> Batch:
        """Return the batch that this rank trains on."""
        return self.batch(torch.Generator().manual_seed(1000 + rank))


class _Block(nn.Module):
    """A transformer block: attention, then a two-layer perceptron, both on the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (third.unflatten(-1, (self.heads, -1)).transpose(1, 2) for third in thirds)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


def _stack(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(_Block(width, heads=8) for _ in range(depth)))


def _mlp(widths: list[int], activation: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def _conv(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def _cnn() -> nn.Module:
    body = [*_conv(3, 32), *_conv(32, 64), *_conv(64, 128)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def _normal(inputs: tuple[int, ...], targets: tuple[int, ...]) -> Callable[[torch.Generator], Batch]:
    return lambda rng: (torch.randn(inputs, generator=rng), torch.randn(targets, generator=rng))


class _Gru(nn.Module):
    """A recurrent network with one output for each sequence."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(x)[0][:, -1])
        return out


MODELS = {
    # As in the distributed tutorials of torch and Paddle.
    "toy": Model(lambda: _mlp([10, 10, 1], nn.ReLU), _normal((20, 10), (20, 1))),
    # A policy network of reinforcement learning: many tiny steps.
    "rl": Model(lambda: _mlp([64, 256, 256, 8], nn.Tanh), _normal((64, 64), (64, 8))),
    "mlp": Model(lambda: _mlp([1024] * 5, nn.ReLU), _normal((32, 1024), (32, 1024))),
    "gpt": Model(lambda: _stack(256, 6), _normal((4, 64, 256), (4, 64, 256))),
    # 300 parameters of a few elements each, so that the cost of each gradient's hook dominates.
    "many": Model(lambda: _mlp([8] * 151, nn.Tanh), _normal((4, 8), (4, 8))),
    "cnn": Model(_cnn, _normal((16, 3, 32, 32), (16, 10))),
}

# For `throughput`: the batch of all ranks together, of which each takes its part.
WHOLE_BATCHES = {
    "rl": Model(MODELS["rl"].build, _normal((64, 64), (64, 8))),
    "gru": Model(lambda: _Gru(32, 128, 8), _normal((64, 32, 32), (64, 8))),
    "gpt": Model(MODELS["gpt"].build, _normal((8, 64, 256), (8, 64, 256))),
    "cnn": Model(MODELS["cnn"].build, _normal((32, 3, 32, 32), (32, 10))),
    "mlp-2m": Model(lambda: _mlp([1024] * 3, nn.ReLU), _normal((64, 1024), (64, 1024))),
    "mlp-4m": Model(MODELS["mlp"].build, _normal((64, 1024), (64, 1024))),
}

_WIDTH, _LAYERS = 2048, 4
WIDE_INPUTS = (2, 1, _WIDTH)
WIDE_BYTES = 4 * _LAYERS * (_WIDTH * _WIDTH + _WIDTH)


def wide() -> nn.Module:
    """Return four layers of 16 MiB, for measurements of memory."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def narrow() -> nn.Module:
    """Return a small model with the inputs and outputs of `wide()`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, 1), nn.Linear(1, _WIDTH))


def form_group(backend: str, rank: int, world_size: int) -> None:
    """Form torch's default process group of this job, with the backend `gloo` or `paceline`."""
    if backend == "paceline":
        import paceline.torch  # noqa: F401  (registers it)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file rather than a port, which another process could take before it is bound.
    store = Path(os.environ["BENCHMARK_DIRECTORY"], "store")
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=LIMIT
    )


def wrap(wrapper: str, module: nn.Module, **options: Any) -> nn.Module:
    """Return the module, wrapped if `wrapper` asks for it.

    Args:
        wrapper: `none`, `torch` for torch's DistributedDataParallel, or `paceline` for Paceline's.
        module: The model to train.
        options: Further arguments of the wrapper.
    """
    if wrapper == "none":
        return module
    if wrapper == "torch":
        return TorchDDP(module, **options)
    from paceline.torch import DistributedDataParallel

    return DistributedDataParallel(module, **options)


def make_optimizer(
    variant: str, parameters: Iterable[torch.Tensor], kind: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer whose step every rank makes in full, or that is sharded.

    Args:
        variant: `whole`; `zero` for torch's ZeroRedundancyOptimizer; or `paceline` for Paceline's
            ShardedOptimizer.
        parameters: The parameters to update.
        kind: The class of the optimizer.
        options: Further arguments.
    """
    if variant == "whole":
        return kind(parameters, **options)
    if variant == "zero":
        with warnings.catch_warnings():  # torch warns about its own code
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(parameters, kind, **options)
    from paceline.torch import ShardedOptimizer

    return ShardedOptimizer(parameters, kind, **options)
