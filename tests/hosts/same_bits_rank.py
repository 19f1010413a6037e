"""One rank of a training with virtual ranks over real links, or the same training by hand; prints the hash.

same_bits_rank.py FRAMEWORK KIND STEPS [by-hand]
"""

from __future__ import annotations

import importlib
import sys

from tests.multiprocess.virtual_training import Run, by_hand


def main(framework: str, kind: str, steps: int, *, alone: bool) -> None:
    if alone:
        print(by_hand(framework, kind, steps), flush=True)
        return
    program = importlib.import_module(f"tests.hosts.in_{framework}")
    rank = program.join(False)
    run = Run(framework, kind, rank, program.world_size(), None)
    print(run.ddp.gradient_path, run.train(steps), flush=True)
    program.leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), alone="by-hand" in sys.argv[4:])
