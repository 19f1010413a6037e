"""The script that every launcher starts: one backward over all hosts. Each rank prints one line.

`launched.py [FRAMEWORK]`; the default is torch.
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
    # Paceline's init_process_group for torch has set these; Paddle does not use them.
    place = [os.environ.get(name, "?") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    # A single write, so that the lines of two ranks do not mix.
    print(
        f"rank {rank} of {program.world_size()} on {os.uname().nodename}, place {' of '.join(place)}: "
        f"{gradient:g} by {path}\n",
        end="",
        flush=True,
    )
    program.leave()


if __name__ == "__main__":
    main()
