"""The exit status of a rank that raises because of another rank, while its thread is in Paddle's Gloo."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_rank_ends_with_the_status_of_its_traceback():
    """Without `_core.hold_late_threads`, 39 of 40 such ranks were aborted."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.multiprocess.paddle_ends"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    for rank, (status, output) in enumerate(json.loads(run.stdout.splitlines()[-1])):
        assert status == 1, (rank, output)
        assert "Traceback (most recent call last)" in output and "the cause" in output, (rank, output)
        assert output.count("to be registered") == 2, (rank, output)
        assert "terminate called" not in output, (rank, output)
