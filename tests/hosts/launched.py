"""The same script for every launcher: one backward over all hosts. Each rank prints one line.

`launched.py [FRAMEWORK]`, torch by default.
"""

from __future__ import annotations

import importlib
import os
import sys


def main() -> None:
    framework = sys.argv[1] if len(sys.argv) > 1 else "torch"
    program = importlib.import_module(f"tests.hosts.in_{framework}")
    rank = program.join(False)
    gradient, path = program.gradient_of(rank)
    # Under torch alone all are set by now; Paddle reads none of these.
    place = [os.environ.get(name, "?") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    # One write, so that lines of two ranks do not mix.
    print(
        f"rank {rank} of {program.world_size()} on {os.uname().nodename}, place {' of '.join(place)}: "
        f"{gradient:g} by {path}\n",
        end="",
        flush=True,
    )
    program.leave()


if __name__ == "__main__":
    main()
