"""A module of the tests as a command of its own: one that forks ranks, which pytest's process must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_module(
    module: str, *arguments: str, deadline_s: float, python: str = sys.executable
) -> tuple[int, str]:
    """Run `python -m module arguments`; its exit status and what it printed.

    Whatever ends the wait, the deadline too, ends it and all processes that it has started.
    """
    command = [python, "-m", module, *arguments]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output
