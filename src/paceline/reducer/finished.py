"""Ranks that run out of data before the others.

The one idea: such a rank takes part in the others' passes with no gradients and a weight of 0, until every
rank has none left; each rank says so in the status that ends a pass, so nobody asks. Then it gets the model
of the rank that went on longest, and its own gradients are again what they were: the next backward adds to
what is there. Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Shadowing(Protocol):
    """The passes of a model."""

    active: Sequence[int]
    world_size: int

    def begin_shadowing(self, *, keep_accumulated: bool) -> None:
        """Put this rank's gradients aside."""
        ...

    def shadow(self, *, weight: float) -> bool:
        """Take part in a pass without data; False: nobody had any. Collective."""
        ...

    def end_shadowing(self) -> None:
        """Give this rank its gradients back."""
        ...

    def broadcast_model(self, root: int) -> None:
        """Give every rank the model of the rank `root`. Collective."""
        ...


def take_part_until_all_finished(passes: Shadowing, after_pass: Callable[[], object] | None) -> None:
    """Shadow the others' passes, then take over the model of those who went on longest. Collective."""
    last_active = passes.active
    passes.begin_shadowing(keep_accumulated=False)
    try:
        while passes.shadow(weight=0.0):
            last_active = passes.active
            if after_pass is not None:
                after_pass()
    finally:
        passes.end_shadowing()
    if len(last_active) < passes.world_size:
        passes.broadcast_model(last_active[0])
