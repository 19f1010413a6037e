"""Some generated programs whose forwards write buffers; `make fuzz WHAT=buffers` makes any number."""

from __future__ import annotations

import pytest

from tests.differential.buffers import check, generate, show


@pytest.mark.parametrize("seed", range(8))
def test_buffers_are_those_of_torchs_class_and_nothing_is_raised(seed: int) -> None:
    program = generate(seed)
    found = check(program)
    assert not found, f"{found}\n{show(program)}"


@pytest.mark.parametrize("seed", range(8))
def test_buffers_of_paddle_are_those_of_one_process(seed: int) -> None:
    program = generate(seed, "paddle")
    found = check(program, "paddle")
    assert not found, f"{found}\n{show(program)}"
