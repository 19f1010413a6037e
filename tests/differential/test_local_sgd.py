"""Some generated programs of local SGD; `make fuzz WHAT=local_sgd` makes any number."""

from __future__ import annotations

import pytest

from tests.differential.local_sgd import check, generate, show


@pytest.mark.parametrize("seed", range(12))
def test_parameters_are_those_of_the_algorithm(seed: int) -> None:
    program = generate(seed)
    found = check(program)
    assert not found, f"{found}\n{show(program)}"
