"""Some generated whole steps of Paddle; `make fuzz WHAT=whole_steps FRAMEWORK=paddle` makes more."""

from __future__ import annotations

import importlib.util

import pytest

from tests.differential.whole_steps import check, generate, show

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="PaddlePaddle is not installed"
)


@pytest.mark.parametrize("seed", range(8))
def test_parameters_are_those_of_one_process(seed: int) -> None:
    program = generate(seed)
    found = check(program)
    assert not found, f"{found}\n{show(program)}"
