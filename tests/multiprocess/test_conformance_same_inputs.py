"""A warning if all ranks train on the same samples, and none if inputs are equal for another reason."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.harness import kept_ranks
from tests.multiprocess.test_conformance import adapter, both

_STEPS = 6
_DATA = np.random.default_rng(5).standard_normal((_STEPS, 8, 4)).astype(np.float32)


def warned(group: object, framework: str, batch_of: Callable[[int], np.ndarray]) -> list[str]:
    """Train a model, and return the warnings about equal inputs."""
    do = adapter(framework)
    model = do.network()
    wrapped = do.wrap(model, group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(_STEPS):
            do.CLEARS[0](wrapped)
            do.backward(do.loss(wrapped, batch_of(step)))
            do.step(model)
    found = [each for each in caught if "same samples" in str(each.message)]
    assert {Path(each.filename).parent for each in found} <= {Path(__file__).parent}, "not the program's line"
    return [str(each.message) for each in found]


@both
@kept_ranks(2, framework="framework")
def test_a_forgotten_sampler(group: object, framework: str) -> None:
    (text,) = warned(group, framework, lambda step: _DATA[step])
    assert text.startswith("All 2 ranks train on the same samples: in 3 batches")
    assert "has no sampler" in text


def drawn_alike(step: int) -> np.ndarray:
    """An input as a benchmark draws it after it has seeded all ranks alike."""
    if not step:
        random.seed(3)
        np.random.seed(3)
    return np.random.standard_normal((8, 4)).astype(np.float32)


@both
@kept_ranks(2, framework="framework")
def test_inputs_that_are_alike_by_design(group: object, framework: str) -> None:
    assert warned(group, framework, lambda step: _DATA[0]) == []
    assert warned(group, framework, lambda step: np.full((8, 4), step + 1.0, np.float32)) == []
    assert warned(group, framework, lambda step: _DATA[step % 2]) == []
    assert warned(group, framework, drawn_alike) == []


@both
@kept_ranks(2, framework="framework")
def test_ranks_with_samples_of_their_own(group: object, framework: str) -> None:
    rank = group.rank
    assert warned(group, framework, lambda step: _DATA[(step + rank) % _STEPS]) == []
