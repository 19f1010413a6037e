"""One process that draws indices: from Paceline's DistributedSampler, or from torch's.

It is rank 0 of two that divide a data set, on one core. Before anything is timed, a check ensures that the
two ranks together draw every sample once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sized
from typing import Protocol

import torch
from torch.utils import data

from paceline.data import DistributedSampler
from paceline.data.order import Shuffled, derive_key

REPLICAS = 2
BATCH = 64
# The number of indices in one array, which stays in the cache.
BLOCK = 1 << 14
_MOST_CHECKED = 100_000


class _Sampler(Sized, Protocol):
    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[int]: ...


class Samplers:
    """Draws indices.

    Args:
        rank: 0, the only process of its case.
        world_size: 1.
        variant: `torch` or `paceline`.
    """

    def __init__(self, rank: int, world_size: int, variant: str) -> None:
        torch.set_num_threads(1)
        self._variant = variant
        self._epoch = 0
        self._draw: Callable[[], object] = lambda: None

    def prepare(self, task: str, length: int) -> int:
        """Check the sampler and prepare a task; return the number of indices in one call."""
        self._check(min(length, _MOST_CHECKED))
        sampler = self._make(length, 0)
        self._draw = {
            "start": lambda: next(iter(self._moved(sampler))),
            "bulk": lambda: (
                self._in_bulk(length) if self._variant == "paceline" else list(self._moved(sampler))
            ),
            "iterate": lambda: deque(self._moved(sampler), maxlen=0),
            "loader": lambda: deque(self._loader(sampler, length), maxlen=0),
        }[task]
        return 1 if task == "start" else len(sampler)

    def time(self, iterations: int) -> float:
        """Return the seconds of `iterations` calls, each with another epoch."""
        start = time.perf_counter()
        for _ in range(iterations):
            self._draw()
        return time.perf_counter() - start

    def _make(self, length: int, rank: int) -> _Sampler:
        if self._variant == "torch":
            return data.DistributedSampler(range(length), REPLICAS, rank)  # type: ignore[arg-type]
        return DistributedSampler(range(length), REPLICAS, rank)

    def _moved(self, sampler: _Sampler) -> _Sampler:
        self._epoch += 1
        sampler.set_epoch(self._epoch)
        return sampler

    def _in_bulk(self, length: int) -> None:
        """Draw the sampler's indices as arrays."""
        self._epoch += 1
        order = Shuffled(length, derive_key(0, self._epoch))
        count = length // REPLICAS
        for first in range(0, count, BLOCK):
            order.at(first * REPLICAS, REPLICAS, min(BLOCK, count - first))

    def _loader(self, sampler: _Sampler, length: int) -> data.DataLoader[int]:
        # The samples cost nothing, so that only the loader and its sampler are measured.
        return data.DataLoader(
            range(length),  # type: ignore[arg-type]
            BATCH,
            sampler=self._moved(sampler),
            collate_fn=len,
        )

    def _check(self, length: int) -> None:
        drawn = [index for rank in range(REPLICAS) for index in self._make(length // 2 * 2, rank)]
        if sorted(drawn) != list(range(length // 2 * 2)):
            raise ArithmeticError(f"{self._variant}: the ranks do not draw each of {length} samples once")
