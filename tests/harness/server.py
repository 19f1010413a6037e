"""The fork servers. Each has imported one framework, which is slow, so that a rank starts in milliseconds.
One has only numpy: its forks cost a fifth of those of a process that has imported torch.

Forking from them is safe where forking from pytest is not: they run no thread and no test. No server has both
frameworks, so that a test of one framework runs as it does for a user of that framework (`preload.py`). All
processes of a test run share them (`shared_servers.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import multiprocessing
import os
import stat
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

from tests.harness import shared_servers

# Ranks share the cores: one thread each. The libraries read these variables when they are imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# multiprocessing keeps one list of its processes. Each start looks through it for processes that have ended,
# and two threads may not ask at once how one process has ended. So threads that run ranks side by side take
# turns.
lock = threading.RLock()


def context() -> ForkServerContext:
    """The multiprocessing context whose processes start from a server; see `starting_from`."""
    return multiprocessing.get_context("forkserver")


def can_fork(framework: str) -> bool:
    """True if ranks may be forked from a process that has imported the framework.

    A Paddle built for GPUs looks at them when it is imported, and no fork of a process that did can use one.
    torch does not, with the variable that tests/conftest.py sets.
    """
    return framework != "paddle" or not _is_paddle_of_gpus()


@functools.cache
def _is_paddle_of_gpus() -> bool:
    return any(each.name == "paddlepaddle-gpu" for each in importlib.metadata.distributions())


@contextlib.contextmanager
def starting_from(framework: str) -> Iterator[None]:
    """A context in which processes of `context` start from the server with this framework, if they can.

    Waits until that server has imported it. multiprocessing has one server per process, and finds it by a
    function of its module; other threads wait meanwhile.
    """
    framework = framework if can_fork(framework) else "numpy"
    with lock:
        before = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server(framework).connect_to_new_process
        try:
            _until_imported(framework)
            yield
        finally:
            forkserver.connect_to_new_process = before


class _Server(forkserver.ForkServer):
    """multiprocessing's end of a server that another process has started."""

    def __init__(self, framework: str) -> None:
        super().__init__()
        self._framework = framework
        # A rank inherits this; otherwise multiprocessing's own server would live as long as the rank.
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)

    def ensure_running(self) -> None:
        _ensure_tracker()
        vars(self).update(shared_servers.find(self._framework))


def _ensure_tracker() -> None:
    """Start multiprocessing's resource tracker, which every process has and none of our tests uses.

    If it has been killed, another one is started without a warning, because the warning would fail the test
    that happens to start a rank. A descriptor that is no longer a pipe is a real error: this process has
    closed a descriptor that it did not own.
    """
    tracker = resource_tracker._resource_tracker
    fd: int | None = tracker._fd  # type: ignore[attr-defined]
    if fd is not None:
        try:
            is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        except OSError:
            is_pipe = False
        if not is_pipe:
            raise RuntimeError(f"something in this process has closed descriptor {fd}, which was not its own")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "resource_tracker: process died unexpectedly")
        resource_tracker.ensure_running()


_server = functools.cache(_Server)


@functools.cache
def _until_imported(framework: str) -> None:
    """Wait until the server has finished its imports: most of a minute on a busy machine."""
    process = context().Process(target=int)
    process.start()
    process.join()
