"""Runs a module of the tests as a command: one that forks ranks, which pytest's process must not do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def started_module(
    module: str, *arguments: str, python: str = sys.executable, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A context in which `python -m module arguments` runs; its stdout and stderr go into a pipe.

    The end of the context waits for it. An exception ends it and all processes that it has started.
    """
    with subprocess.Popen(
        [python, "-m", module, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def run_module(
    module: str, *arguments: str, deadline_s: float, python: str = sys.executable
) -> tuple[int, str]:
    """Run `python -m module arguments` and kill it at the deadline; return its exit status and its output."""
    with started_module(module, *arguments, python=python) as process:
        output, _ = process.communicate(timeout=deadline_s)
        return process.returncode, output
