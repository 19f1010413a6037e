"""Jobs that are stopped at random moments and resumed have the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import needs_paddle
from tests.harness.command import run_module
from tests.harness.warm import warm_python

SIGNALS = 3


@pytest.mark.parametrize(
    "how", ["torch paceline", "torch torchrun", pytest.param("paddle paceline", marks=needs_paddle)]
)
def test_jobs_that_are_preempted_end_with_the_same_bits(tmp_path: Path, how: str) -> None:
    framework, launcher = how.split()
    arguments = (str(tmp_path), str(SIGNALS), "0", framework, launcher)
    # Imports take no time in a warm Python: signals during imports are left to `make preempt`.
    python = warm_python(framework)
    status, said = run_module("tests.multiprocess.preempted", *arguments, deadline_s=1200.0, python=python)
    assert status == 0, said
