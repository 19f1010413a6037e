"""Functions that `spawn` runs in these tests. Every rank imports this module, so it imports little."""

from __future__ import annotations

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


def hang_or_fail(rank: int, hangs: Path) -> None:
    if rank == 0:
        hangs.touch()
        time.sleep(1000)
    wait_for_file(rank, hangs)
    raise ValueError("boom")


def hang_last(rank: int) -> None:
    if rank == 1:
        time.sleep(1000)


def wait_for_file(rank: int, path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def raise_in_a_group(rank: int, folder: Path) -> None:
    """Rank 1 raises while rank 0 waits for it; rank 0 writes the error that it gets to a file."""
    import paceline

    group = paceline.init()
    group.barrier()
    if rank == 1:
        raise ValueError("the cause")
    try:
        group.barrier()
    except paceline.errors.PeerLostError as error:
        (folder / "learned").write_text(str(error))
        raise


def write_secret(rank: int, folder: Path) -> None:
    from paceline.rendezvous.secret import find_secret

    secret = find_secret()
    (folder / f"{rank}").write_text(f"{secret.source} {secret.key.decode()}")


def train(rank: int) -> None:
    """The program of docs/troubleshooting.md: rank 1 fails, while rank 0 would run for a minute."""
    if rank == 1:
        raise ValueError("no such file: data/train.npz")
    time.sleep(60.0)
