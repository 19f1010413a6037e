"""Some generated programs in which a signal handler raises; see `tests.differential.handlers`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.differential.handlers import check, generate, show

FRAMEWORKS = ["torch", *(["paddle"] if importlib.util.find_spec("paddle") else [])]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_raise_or_have_made_the_same_steps(framework: str, seed: int) -> None:
    program = generate(seed, framework)
    found = check(program, framework)
    assert not found, f"{found}\n{show(program)}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_handler_raises_anywhere_in_a_backward(framework: str) -> None:
    """At lines all over one backward of a model with buffers, over the memory of a host."""
    program = generate(0) | {
        "path": "memory",
        "options": {},
        "has_norm": True,
        "is_sharded": False,
        "within": "backward",
        "catches": False,
    }
    found = check(program, framework, [(number + 0.5) / 40 for number in range(40)])
    assert not found, found


def test_a_handler_raises_while_the_hooks_of_a_static_graph_change() -> None:
    """At the end of the first backward; in later ones each parameter still has one hook."""
    program = generate(39)
    assert "static_graph" in program["options"] and program["at"] == 0 and program["catches"]
    found = check(program)
    assert not found, found
