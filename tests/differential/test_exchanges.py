"""Some generated programs that exchange gradients; `make fuzz WHAT=exchanges` makes more."""

from __future__ import annotations

import pytest

from tests.harness.command import run_module
from tests.harness.warm import warm_python


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_gradients_are_those_of_one_process(framework: str) -> None:
    arguments = ("--framework", framework, "--seeds", "0:40")
    python = warm_python(framework)
    status, output = run_module("tests.differential.exchanges", *arguments, deadline_s=300, python=python)
    assert status == 0, output
