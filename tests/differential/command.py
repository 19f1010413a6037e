"""The fuzzer as the tests run it: in a process of its own, because it forks its ranks. Knows no framework."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_DEADLINE_S = 300


def fuzz(*arguments: str) -> tuple[int, str]:
    """Run the fuzzer; its exit status and what it printed."""
    command = [sys.executable, "-m", "tests.differential", *arguments]
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_DEADLINE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output
