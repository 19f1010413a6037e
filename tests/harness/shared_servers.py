"""The process that starts the fork servers of a test run, each once, and ends them with the run.

The imports of a server take seconds of a core. So all processes of a run share the servers: the workers of
pytest, and the programs that a test starts and that start ranks themselves. The first process of the run
starts this one (`share`), and leaves its address in the environment for the others. A process that needs a
server asks for it, and the first request starts it (`find`). This process ends with the one that started it,
whose end of a pipe the kernel closes, and the servers end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
# The environment variable with the address for requests.
ADDRESS = "TESTS_FORK_SERVERS"
_PATIENCE_S = 10.0  # for a process that is about to ask, on a busy machine


def share() -> None:
    """Make this process, and those that it starts from now on, share their fork servers."""
    if ADDRESS in os.environ:
        return
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the process that has started it
    )
    assert process.stdin is not None and process.stdout is not None
    address = process.stdout.readline().strip()
    process.stdout.close()
    if not address:
        raise RuntimeError(f"{__name__} ended with status {process.wait()}; its error is above")
    os.environ[ADDRESS] = address
    atexit.register(process.wait)
    atexit.register(process.stdin.close)


def find(framework: str) -> dict[str, Any]:
    """The attributes that `multiprocessing.forkserver.ForkServer` needs for the server of `framework`."""
    share()
    with connection.Client(os.environ[ADDRESS], "AF_UNIX") as asked:
        asked.send(framework)
        found: dict[str, Any] = asked.recv()
    return found


def main() -> None:
    """Start servers on request, until the process that started this one has ended."""
    from tests.harness.server import ONE_THREAD

    os.environ |= ONE_THREAD
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    servers: dict[str, forkserver.ForkServer] = {}
    with (
        tempfile.TemporaryDirectory(prefix="servers-") as folder,
        connection.Listener(os.path.join(folder, "address"), "AF_UNIX", backlog=64) as listener,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(listener._listener._socket, selectors.EVENT_READ)  # type: ignore[attr-defined]
        print(listener.address, flush=True)
        # For the output of a server: no process reads the pipe.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        while all(key.fileobj is not sys.stdin for key, _ in selector.select()):
            # The process that asks may be killed before it has received its answer, or stopped.
            with contextlib.suppress(EOFError, OSError), listener.accept() as asked:
                if asked.poll(_PATIENCE_S):
                    asked.send(_start(servers, asked.recv()))


def _start(servers: dict[str, forkserver.ForkServer], framework: str) -> dict[str, Any]:
    if framework not in servers:
        servers[framework] = forkserver.ForkServer()
        servers[framework].set_forkserver_preload(["tests.harness.preload"])
    os.environ["PACELINE_PRELOAD"] = framework
    servers[framework].ensure_running()
    names = ("_forkserver_address", "_forkserver_authkey")  # the second from Python 3.14 on
    return {name: value for name, value in vars(servers[framework]).items() if name in names}
