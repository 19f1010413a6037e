"""The fork servers: each has imported one framework, which is slow, so that a rank starts in milliseconds.
One has numpy alone: its forks cost a fifth of those of a process that has imported torch.

Forking from them is safe where forking from pytest is not: they run no thread and no test. No server has both
frameworks, so that a test of one finds what a user of that one has.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.harness.huge_pages import use_huge_pages

_ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = (
    "numpy",
    "numpy.testing",
    "pytest",
    "hypothesis",
    "paceline.collectives.init",
    "tests.harness.rank_main",
)
# torch's optimizers import its compiler when the first of them is made, which takes longer than most tests.
_PRELOADED_OF = {
    "torch": (
        "torch",
        "paceline.torch",
        "torch._dynamo",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    ),
    "paddle": ("paceline.paddle",),
    "numpy": (),
}
# Ranks share the cores: one thread each, and the libraries read this when they are imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def context() -> ForkServerContext:
    """The multiprocessing context whose processes start from a server; see `starting_from`."""
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def starting_from(framework: str) -> Iterator[None]:
    """Within it, processes of `context` start from the server that has this framework imported.

    Starts the server on the first call, and waits until it has imported. multiprocessing has one server for
    a process, and finds it by a function of its module.
    """
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
    server.set_forkserver_preload([__name__])
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


def _preload(framework: str) -> None:
    for name in (*_PRELOADED, *_PRELOADED_OF[framework]):
        # Whatever is wrong with a module: the rank that needs it reports it, where it can be read.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


if _framework := os.environ.pop("PACELINE_PRELOAD", None):
    _preload(_framework)
    # A rank's garbage collector would walk all objects of the framework, and copy the pages they lie in.
    gc.collect()
    gc.freeze()
    use_huge_pages()
