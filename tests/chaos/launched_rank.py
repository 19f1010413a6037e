"""A rank of a trial under a launcher; with a second argument, the caller of `paceline.spawn`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path


def train(_: int, folder: str) -> None:
    """One rank's program, in a new interpreter: how that ends is part of the trial."""
    from tests.chaos.board import Board
    from tests.chaos.strikes import Striker

    plan = pickle.loads((Path(folder) / "plan").read_bytes())
    rank = int(os.environ["RANK"])
    board = Board(Path(folder) / "board", plan.job.world_size)
    board.note_pid(rank, os.getpid())
    striker = Striker(plan.fault, rank, board)
    print(f"rank {rank} begins", flush=True)  # so that the rank notices a full disk behind its output
    striker.at("import")
    from tests.chaos.rank import run_rank
    from tests.chaos.torch_rank import destroy, make_trainer

    atexit.register(striker.at, "exit")
    run_rank(plan, rank, board, make_trainer(plan, rank, "", Path(folder), striker), striker)
    striker.at("destroy")
    destroy()


@contextlib.contextmanager
def _output_of_spawn(folder: Path) -> Iterator[None]:
    """The destination of the ranks' output: perhaps a stream of the program's own, whose disk is full."""
    plan = pickle.loads((folder / "plan").read_bytes())
    if plan.fault.kind.name != "full disk: stream":
        yield
        return
    full = Path("/dev/full").open("w")  # noqa: SIM115  # closing it fails, too
    with contextlib.redirect_stdout(full):
        yield
    with contextlib.suppress(OSError):
        full.close()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        import paceline

        options = {
            name: float(text) if name.endswith("_s") else text
            for name, text in json.loads(sys.argv[3]).items()
        }
        with _output_of_spawn(Path(sys.argv[1])):
            paceline.spawn(train, args=(sys.argv[1],), nprocs=int(sys.argv[2]), **options)
    else:
        train(0, sys.argv[1])
