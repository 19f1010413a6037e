"""The fork servers: each has imported one framework, which is slow, so that a rank starts in milliseconds.
One has numpy alone: its forks cost a fifth of those of a process that has imported torch.

Forking from them is safe where forking from pytest is not: they run no thread and no test. No server has both
frameworks, so that a test of one finds what a user of that one has (`preload.py`).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# Ranks share the cores: one thread each, and the libraries read this when they are imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# multiprocessing keeps one list of its processes. Each start looks through it for those that have ended, and
# two threads may not ask how one process has ended: threads that run ranks side by side take turns.
lock = threading.RLock()


def context() -> ForkServerContext:
    """The multiprocessing context whose processes start from a server; see `starting_from`."""
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def starting_from(framework: str) -> Iterator[None]:
    """Within it, processes of `context` start from the server that has this framework imported.

    Starts the server on the first call, and waits until it has imported. multiprocessing has one server for
    a process, and finds it by a function of its module; other threads wait meanwhile.
    """
    with lock:
        before = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _server(framework).connect_to_new_process
        try:
            _until_imported(framework)
            yield
        finally:
            forkserver.connect_to_new_process = before


@functools.cache
def _server(framework: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.harness.preload"])
    python_path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    with _environment(PYTHONPATH=python_path, PACELINE_PRELOAD=framework, **ONE_THREAD):
        server.ensure_running()
    return server


@functools.cache
def _until_imported(framework: str) -> None:
    """The server takes its first request when it has imported: on a busy machine, after most of a minute."""
    process = context().Process(target=int)
    process.start()
    process.join()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
