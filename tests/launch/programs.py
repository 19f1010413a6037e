"""What ranks of `spawn` run in these tests: a module that imports little, since every rank imports it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from paceline.env import read_rank_environment


def write_place(rank: int, folder: Path, word: str) -> None:
    place = read_rank_environment()
    (folder / f"{rank}").write_text(f"{place.rank} {place.world_size} {place.local_rank} {word}")


def put_rank(rank: int, queue: Any) -> None:
    queue.put(10 + rank)
    print("put", rank)


def fail(rank: int, culprit: int, how: str) -> None:
    if rank == culprit:
        if how == "raise":
            raise ValueError("boom")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def wait_for_file(rank: int, path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
