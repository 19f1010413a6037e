"""Where the ranks of a run tell each other how far they are, in files: no deadline but the harness's.

What a test gives a short time-out must not count how much later one process has started than another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def tell(word: str, rank: int) -> None:
    """Let the other ranks know that this one has come to `word`."""
    _sign(word, rank).touch()


def until_told(word: str, by: Iterable[int]) -> None:
    """Wait until each of these ranks has come to `word`."""
    signs = [_sign(word, rank) for rank in by]
    while not all(sign.exists() for sign in signs):
        time.sleep(0.01)


def meet(word: str, rank: int) -> None:
    """Wait until all ranks of the run have come to `word`."""
    tell(word, rank)
    until_told(word, range(int(os.environ["WORLD_SIZE"])))


def _sign(word: str, rank: int) -> Path:
    return Path(os.environ["TMPDIR"]) / f"{word}-{rank}"
