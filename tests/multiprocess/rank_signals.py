"""Signals between the ranks of a test, as files: waiting for them has no deadline but the harness's.

A test with a short timeout lets its ranks wait for each other here first, because the timeout must not
include how much later one process has started than another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def publish(word: str, rank: int) -> None:
    """Publish that this rank has reached `word`."""
    _sign(word, rank).touch()


def wait_until_published(word: str, by: Iterable[int]) -> None:
    """Wait until each of these ranks has published `word`."""
    signs = [_sign(word, rank) for rank in by]
    while not all(sign.exists() for sign in signs):
        time.sleep(0.01)


def barrier(word: str, rank: int) -> None:
    """A barrier: wait until all ranks of the run have reached `word`."""
    publish(word, rank)
    wait_until_published(word, range(int(os.environ["WORLD_SIZE"])))


def _sign(word: str, rank: int) -> Path:
    return Path(os.environ["TMPDIR"]) / f"{word}-{rank}"
