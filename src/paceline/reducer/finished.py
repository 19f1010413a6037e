"""Ranks that run out of data before the others.

The one idea: such a rank takes part in the others' passes with no gradients and a weight of 0, until every
rank has none left; each rank says so in the status that ends a pass, so nobody asks. Then it gets the model
of the rank that went on longest, and its own gradients are again what they were: the next backward adds to
what is there. `joining` is the same as a context. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


class Shadowing(Protocol):
    """The passes of a model."""

    active: Sequence[int]
    world_size: int
    refuses_uneven: bool

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
    _take_part(passes, after_pass, weight=0.0, keep_accumulated=False)


@contextlib.contextmanager
def joining(passes: Shadowing, *, divide_by_all: bool, throws: bool) -> Iterator[None]:
    """Within it, ranks may make different numbers of passes. Its end is collective.

    Args:
        passes: Of the model.
        divide_by_all: Ranks without data count in the mean, with zeros.
        throws: All ranks raise at the end of the first pass for which one had no data.
    """
    before, passes.refuses_uneven = passes.refuses_uneven, throws
    try:
        yield
        _take_part(passes, None, weight=1.0 if divide_by_all else 0.0, keep_accumulated=True)
    finally:
        passes.refuses_uneven = before


def _take_part(
    passes: Shadowing, after_pass: Callable[[], object] | None, *, weight: float, keep_accumulated: bool
) -> None:
    last_active = passes.active
    passes.begin_shadowing(keep_accumulated=keep_accumulated)
    try:
        while passes.shadow(weight=weight):
            last_active = passes.active
            if after_pass is not None:
                after_pass()
    finally:
        passes.end_shadowing()
    if 0 < len(last_active) < passes.world_size:  # 0: all have finished before, and made no pass since
        passes.broadcast_model(last_active[0])
