"""One rank of one case: creates the worker's object and calls its methods, until the runner's socket closes.

Any launcher starts it as `python -m benchmarks.workers SOCKET`. Every command has a time limit, at which this
process writes its stacks and ends by itself, even if it is stuck in C++.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import sys
import time
import traceback
from typing import Any

# The rank of a process under torch's launcher, Open MPI, PRRTE and MPICH.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def main(path: str) -> None:
    """Connect to the socket at `path`, then run the commands that arrive."""
    cores = os.environ.get("BENCHMARK_CORES")
    if cores:  # before any library starts threads, which inherit it
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")
        _send(stream, {"rank": rank, "pid": os.getpid()})
        worker: Any = None
        for line in stream:
            command = json.loads(line)
            faulthandler.dump_traceback_later(command["limit_s"], exit=True)
            try:
                if command["method"]:
                    answer = {"result": getattr(worker, command["method"])(**command["arguments"])}
                else:
                    worker = _make(rank, **command["arguments"])
                    answer = {"result": None}
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {str(error).strip()[:2000]}"
                answer = {"error": f"raised {text}", "moment_s": time.monotonic()}
            faulthandler.cancel_dump_traceback_later()
            _send(stream, answer)
        _close(worker)


def _make(rank: int, target: str, options: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    factory = getattr(importlib.import_module(module), name)
    return factory(rank=rank, world_size=int(os.environ["WORLD_SIZE"]), **options)


def _close(worker: Any) -> None:
    """Close the object within a few seconds: the other ranks may be dead already."""
    faulthandler.dump_traceback_later(3.0, exit=True)
    if hasattr(worker, "close"):
        worker.close()


def _send(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    # Whatever a case left running (threads, a half-closed group) must not keep the process alive.
    sys.stdout.flush()
    os._exit(0)
