"""Some generated programs that exchange gradients; `make fuzz WHAT=exchanges` makes more."""

from __future__ import annotations

import pytest

from tests.harness.command import run_module
from tests.harness.warm import warm_python


# In the last one, the norm's input needs no gradient, since no layer before it has parameters.
@pytest.mark.parametrize(
    "framework, seeds", [("torch", "0:40"), ("paddle", "0:40"), ("torch", "30016:30017")]
)
def test_gradients_are_those_of_one_process(framework: str, seeds: str) -> None:
    arguments = ("--framework", framework, "--seeds", seeds)
    python = warm_python(framework)
    status, output = run_module("tests.differential.exchanges", *arguments, deadline_s=300, python=python)
    assert status == 0, output
