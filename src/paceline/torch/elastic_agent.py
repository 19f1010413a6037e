"""torch's elastic agent: `python -m paceline.torch.elastic_agent`, with the arguments of torchrun.

If ranks fail, torch's agent raises, and its traceback says nothing about them and hides their output. This
module reports the failed ranks instead.
"""

from __future__ import annotations

import socket
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from paceline.launch.failure_report import RankEnd, describe_end
from paceline.launch.output import say


def main() -> None:
    """Run the ranks; the exit status is 1 if any of them failed."""
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
