"""The fork server: imports what is slow to import once, so that a rank starts in milliseconds.

Forking from it is safe where forking from pytest is not: it runs no thread and no test.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = (
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "paceline.collectives.init",
    "paceline.torch",
    "paceline.paddle",
    "tests.harness.rank_main",
)
# Ranks share the cores: one thread each, and the libraries read this when they are imported.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@functools.cache
def context() -> ForkServerContext:
    """The multiprocessing context whose server has everything imported; starts it on the first call."""
    started = multiprocessing.get_context("forkserver")
    started.set_forkserver_preload([__name__])
    python_path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    with _environment(PYTHONPATH=python_path, PACELINE_PRELOAD="1", **ONE_THREAD):
        forkserver.ensure_running()
    return started


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _preload() -> None:
    for name in _PRELOADED:
        # Whatever is wrong with a module: the rank that needs it reports it, where it can be read.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


if os.environ.pop("PACELINE_PRELOAD", None):
    _preload()
