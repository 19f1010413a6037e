"""A process that has trained over Gloo ends as its program does, however late Gloo's threads are."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize("ending, status", [("destroyed", "0"), ("raised", "3")])
def test_no_thread_of_gloo_aborts_the_process(ending: str, status: str) -> None:
    """The ranks may wait here for longer than the second that users wait: the machine may be busy."""
    command = [sys.executable, "-m", "tests.fault.gloo_exits", "--exits", "8", "--wait-s", "120"]
    command += ["--ending", ending]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {status: 8}, run.stderr
