"""Estimates the memory of a training, by variant: parameters, gradients and an optimizer's state.

Variants (torch's DDP, ZeRO, Paceline with its options) differ in how many copies they keep: one for each
rank, one for each host, or one for all. Activations, which depend on the batch, and the memory of a process
before it has a model are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

REGION_BYTES = 672 << 10
"""Host memory that collectives use for each rank: two buffers for small arrays, two staging buffers for large
ones (2 * (16 + 256) KiB), and one for messages. See cpp/core/region_layout.h."""


@dataclass(frozen=True)
class ModelSizes:
    """The size of one copy of a model, in bytes.

    Attributes:
        parameters: All parameters.
        buffers: All buffers.
        gradients: The gradients of the trained parameters.
        gradient_buffer: The same gradients in the gradient buffer, where each begins at a multiple of 64
            bytes.
        state: The optimizer's state of all parameters.
    """

    parameters: int
    buffers: int
    gradients: int
    gradient_buffer: int
    state: int


@dataclass(frozen=True)
class Memory:
    """The memory that one variant takes on each host, in bytes.

    Attributes:
        label: The variant in words.
        parameters: Parameters and buffers.
        gradients: Gradients after a step, and the memory where they are averaged; at most.
        state: The optimizer's state.
        region: The memory of the collectives.
    """

    label: str
    parameters: int
    gradients: int
    state: int
    region: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state + self.region


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a training takes on each host, by variant.

    Attributes:
        ranks: Number of ranks on all hosts.
        hosts: Number of hosts, with equally many ranks each.
        sizes: The size of one copy of the model.
        ways: The variants, by the names of the cases of `python -m benchmarks memory --of training`:
            `torch_view`, `zero`, `zero_view`, `paceline`, `paceline_view`, `paceline_sharded`,
            `paceline_shared`, `paceline_shared_view` and `paceline_scatter`.
        is_allocated: Whether the model had to be allocated in memory to measure it.
    """

    ranks: int
    hosts: int
    sizes: ModelSizes
    ways: Mapping[str, Memory]
    is_allocated: bool = False


@dataclass(frozen=True)
class _Variant:
    label: str
    copies_of_gradients: int
    is_ours: bool = False
    shares_parameters: bool = False
    shards_state: bool = False


_VARIANTS = {
    "torch_view": _Variant("torch DDP, bucket view", 1),
    "zero": _Variant("ZeroRedundancyOptimizer", 2, shards_state=True),
    "zero_view": _Variant("ZeroRedundancyOptimizer, bucket views", 1, shards_state=True),
    "paceline": _Variant("Paceline", 2, is_ours=True),
    "paceline_view": _Variant("Paceline, bucket view", 1, is_ours=True),
    "paceline_sharded": _Variant("ShardedOptimizer, bucket view", 1, is_ours=True, shards_state=True),
    "paceline_shared": _Variant(
        "one model, ShardedOptimizer", 2, is_ours=True, shares_parameters=True, shards_state=True
    ),
    "paceline_shared_view": _Variant(
        "one model, ShardedOptimizer, bucket view", 1, is_ours=True, shares_parameters=True, shards_state=True
    ),
    "paceline_scatter": _Variant(
        "one model, ShardedOptimizer, scatter", 1, is_ours=True, shares_parameters=True, shards_state=True
    ),
}


def plan_ways(sizes: ModelSizes, ranks: int, hosts: int, *, is_allocated: bool = False) -> MemoryPlan:
    """The memory of each variant on one of the hosts."""
    ways = {key: _memory_of(variant, sizes, ranks // hosts, hosts) for key, variant in _VARIANTS.items()}
    return MemoryPlan(ranks, hosts, sizes, MappingProxyType(ways), is_allocated)


def _memory_of(variant: _Variant, sizes: ModelSizes, local_ranks: int, hosts: int) -> Memory:
    one_copy = sizes.gradient_buffer if variant.is_ours else sizes.gradients
    copied = (variant.copies_of_gradients - 1) * sizes.gradients
    parameters = sizes.parameters * (1 if variant.shares_parameters else local_ranks)
    return Memory(
        label=variant.label,
        parameters=parameters + local_ranks * sizes.buffers,
        gradients=local_ranks * (one_copy + copied),
        state=-(-sizes.state // hosts) if variant.shards_state else local_ranks * sizes.state,
        region=local_ranks * REGION_BYTES if variant.is_ours else 0,
    )
