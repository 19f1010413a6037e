"""What both programs with virtual ranks do by hand: batches, seeds, and a tree that is written out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from paceline.data import DistributedBatchSampler

LENGTH, GLOBAL_BATCH = 40, 16  # three steps an epoch, the last one padded


def tree(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def global_batches() -> Iterator[list[int]]:
    sampler = DistributedBatchSampler(
        range(LENGTH), num_replicas=1, rank=0, shuffle=True, global_batch_size=GLOBAL_BATCH
    )
    while True:
        yield from sampler


def number_of(*parts: object) -> int:
    """The seed of a micro-batch, of (seed, step, "micro-batch", virtual rank)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
