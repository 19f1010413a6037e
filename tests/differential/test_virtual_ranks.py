"""Some generated trainings with virtual ranks; `make fuzz WHAT=virtual_ranks` makes more."""

from __future__ import annotations

import pytest

from tests.differential.virtual_ranks import check, generate, show


@pytest.mark.parametrize(
    "framework, seed", [*(("torch", seed) for seed in range(6)), ("paddle", 1), ("paddle", 16)]
)
def test_any_number_of_processes_ends_with_the_same_bits(framework: str, seed: int) -> None:
    if framework == "paddle":
        pytest.importorskip("paddle")
    program = generate(seed, framework)
    found = check(program, framework)
    assert not found, f"{found}\n{show(program)}"
