"""Orders: which sample lies at which place of an epoch, computed when asked.

An order is a function of (length, key) and stores nothing that grows with the length, so any
rank can ask for any places at any time: to deal them out, to skip those already trained on, to start again
with another number of ranks.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline import _core

Indices = npt.NDArray[np.int64]


class Order(Protocol):
    length: int

    def at(self, start: int, stride: int, count: int) -> Indices:
        """The indices at places start, start + stride, ...: `count` of them, all below `length`."""


class InOrder:
    def __init__(self, length: int) -> None:
        self.length = length

    def at(self, start: int, stride: int, count: int) -> Indices:
        return places_from(start, stride, count)


class Shuffled:
    """A permutation drawn by `key`; see cpp/data/permutation.h."""

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        self._permutation = _core.Permutation(length, key)

    def at(self, start: int, stride: int, count: int) -> Indices:
        indices = np.empty(count, np.int64)
        self._permutation.fill(indices, start, stride)
        return indices

    def map(self, places: Indices) -> Indices:
        indices = places.copy()
        self._permutation.map(indices)
        return indices


def places_from(start: int, stride: int, count: int) -> Indices:
    """start, start + stride, ...: `count` of them, without going beyond 64 bits on the way."""
    return np.arange(count, dtype=np.int64) * stride + start


def derive_key(seed: int, *parts: int | str) -> int:
    """64 bits that differ, as if by chance, for every seed and every sequence of parts.

    Adding seed and epoch would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
