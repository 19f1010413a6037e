"""Steps whose backwards come in another order than their forwards, the same in every framework."""

from __future__ import annotations

import random
from typing import Any, Protocol

from tests.differential.programs import Op


class Steps(Protocol):
    """The primitives that a grammar makes steps of."""

    rng: random.Random
    ranks: int
    is_weighted: bool

    def forward(self, to: str = "loss", **arguments: Any) -> Op: ...

    def backward(self, *of: str, **arguments: Any) -> Op: ...

    def plain(self) -> list[Op]: ...

    def accumulate(self) -> list[Op]: ...

    def clear(self, *, sure: bool = False) -> list[Op]: ...

    def end(self) -> list[Op]: ...


def out_of_order(steps: Steps) -> list[Op]:
    """A forward in no_sync() between another one and its backward, or the other way round."""
    if steps.is_weighted:  # otherwise each backward in no_sync() needs a weight there
        return steps.accumulate()
    ops = [steps.forward("a"), steps.forward("b", no_sync=True)]
    steps.rng.shuffle(ops)
    backwards = [
        [steps.backward("a")],  # the other one was for a log
        [steps.backward("b"), steps.backward("a")],
        [steps.backward("b", no_sync=True), steps.backward("a")],
        [steps.backward("a"), steps.backward("b"), *steps.plain()],
        [steps.backward("a", "b")],
    ]
    return [*steps.clear(sure=True), *ops, *steps.rng.choice(backwards), *steps.end()]


def of_episodes(steps: Steps) -> list[Op]:
    """One rank makes more forwards for a backward than the others."""
    if steps.is_weighted:  # as above
        return steps.accumulate()
    odd = [steps.rng.randrange(steps.ranks)]
    ops = [steps.forward("a"), steps.forward("b", ranks=odd)]
    names = ["a", "b"]
    if steps.rng.random() < 0.3:
        ops.append(steps.forward("c", ranks=odd))
        names.append("c")
    steps.rng.shuffle(ops)
    return [*steps.clear(sure=True), *ops, steps.backward(*names), *steps.end()]
