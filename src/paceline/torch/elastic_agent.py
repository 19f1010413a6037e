"""Torch's elastic agent: `python -m paceline.torch.elastic_agent`, with the arguments of torchrun.

Where ranks have failed, the agent raises: its traceback tells nothing of them, and hides what they have said.
"""

from __future__ import annotations

import socket
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paceline.launch.output import say
from paceline.launch.report import RankEnd, describe_end


def main() -> None:
    """Run the ranks; exit status 1 if some have failed."""
    try:
        run.main()
    except ChildFailedError as error:
        ends = [
            f"  rank {rank}: {describe_end(RankEnd(rank, failure.pid, failure.exitcode, 0.0))}"
            for rank, failure in sorted(error.failures.items())
        ]
        say("\n".join([f"paceline: ranks of host {socket.gethostname()} failed", *ends]))
        sys.exit(1)


if __name__ == "__main__":
    main()
