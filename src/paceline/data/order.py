"""Orders: functions that compute which sample is at which place of an epoch.

The two orders here depend only on (length, key), and store nothing that grows with the length. So any rank
can compute the samples at any places: to deal them out, to skip those already trained on, or to resume with
another number of ranks.
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
    """start, start + stride, ...: `count` of them, computed without overflow of 64 bits."""
    return np.arange(count, dtype=np.int64) * stride + start


def derive_key(seed: int, *parts: int | str) -> int:
    """A hash of 64 bits of the seed and the parts.

    The sum of seed and epoch would give epoch 1 of seed 0 the same order as epoch 0 of seed 1.
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
