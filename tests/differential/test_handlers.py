"""Some generated programs in which a signal handler raises; see `tests.differential.handlers`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.differential.handlers import check, generate, show

SEEDS = [
    seed for seed in range(6) if importlib.util.find_spec("paddle") or generate(seed)["framework"] == "torch"
]


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_raise_or_have_made_the_same_steps(seed: int) -> None:
    program = generate(seed)
    found = check(program)
    assert not found, "\n".join([*found, show(program)])


@pytest.mark.parametrize("framework", ["torch", *(["paddle"] if importlib.util.find_spec("paddle") else [])])
def test_a_handler_raises_anywhere_in_a_backward(framework: str) -> None:
    """At lines all over one backward of a model with buffers, over the memory of a host."""
    program = generate(0) | {
        "framework": framework,
        "path": "memory",
        "options": {},
        "has_norm": True,
        "is_sharded": False,
        "within": "backward",
    }
    found = check(program, [(number + 0.5) / 40 for number in range(40)])
    assert not found, "\n".join(found)
