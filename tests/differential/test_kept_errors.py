"""Some generated programs of compressed gradients; `make fuzz WHAT=kept_errors` makes more."""

from __future__ import annotations

import pytest

from tests.differential.kept_errors import check, generate, show


@pytest.mark.parametrize(
    "framework, seed", [*(("torch", seed) for seed in (*range(8), 30173)), ("paddle", 1), ("paddle", 2)]
)
def test_what_has_arrived_is_the_sum_of_the_gradients(framework: str, seed: int) -> None:
    if framework == "paddle":
        pytest.importorskip("paddle")
    program = generate(seed, framework)
    found = check(program, framework)
    assert not found, f"{found}\n{show(program)}"
