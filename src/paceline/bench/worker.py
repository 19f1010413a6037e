"""One rank of one contender: obeys the conductor until its socket closes.

Run as `python -m paceline.bench.worker SOCKET`, by any launcher. Every command carries a time
limit, at which this process writes its stacks and ends by itself, even when it is stuck in C++.
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

# As torch's launcher, Open MPI, PRRTE and MPICH tell a process which rank it is.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK")


def main(path: str) -> None:
    """Say hello on the socket at `path`, then obey."""
    cores = os.environ.get("PACELINE_BENCH_CORES")
    if cores:  # before any library starts threads, which inherit it
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    rank = next(int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")
        _say(stream, {"rank": rank, "pid": os.getpid()})
        subject: Any = None
        for line in stream:
            command = json.loads(line)
            faulthandler.dump_traceback_later(command["limit_s"], exit=True)
            try:
                if command["method"]:
                    answer = {"result": getattr(subject, command["method"])(**command["arguments"])}
                else:
                    subject = _make(rank, **command["arguments"])
                    answer = {"result": None}
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {str(error).strip()[:2000]}"
                answer = {"error": f"raised {text}", "moment_s": time.monotonic()}
            faulthandler.cancel_dump_traceback_later()
            _say(stream, answer)
        _leave(subject)


def _make(rank: int, target: str, options: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    factory = getattr(importlib.import_module(module), name)
    return factory(rank=rank, world_size=int(os.environ["WORLD_SIZE"]), **options)


def _leave(subject: Any) -> None:
    """Close politely, for at most a few seconds: the other ranks may be dead already."""
    faulthandler.dump_traceback_later(3.0, exit=True)
    if hasattr(subject, "close"):
        subject.close()


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    # Whatever a contender left running (engine threads, a half-closed group) must not keep the process.
    sys.stdout.flush()
    os._exit(0)
