"""Ranks that run out of data before the others, and shadow the passes of those who have some.

The one idea: such a rank takes part in the passes of the others with no gradients and a weight of 0, until
every rank has none left; each rank says so in the status that ends a pass, so nobody asks. Then it gets the
model of the rank that went on longest, and its own gradients are again what they were.

A pass without data is one as any other, so `Passes.shadow` makes it; of the passes of a model nothing more is
needed here than `UnevenPasses`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from paceline.errors import ConfigError
from paceline.reducer.passes.front_end import Gradients
from paceline.reducer.passes.state import PassState


class UnevenPasses(Protocol):
    """The passes of one model, some of which ranks make without data.

    Attributes:
        state: Where they are.
        gradients: This rank's.
        world_size: Number of ranks.
        active: Ranks that had data in the last pass.
        shares_parameters: Whether the ranks of each host have one copy of the parameters.
        refuses_uneven: Whether a pass for which some ranks have no data raises, on all of them.
    """

    state: PassState
    gradients: Gradients
    world_size: int
    active: Sequence[int]
    shares_parameters: bool
    refuses_uneven: bool

    @property
    def who(self) -> str:
        """This rank in words."""
        ...

    def settle_interrupted(self) -> None:
        """Where an exception has ended the last backward, let no gradient lie where ranks may still write."""
        ...

    def shadow(self, *, weight: float) -> bool:
        """Take part in a pass of the others without gradients; whether any rank had data. Collective."""
        ...

    def broadcast_model(self, root: int) -> None:
        """Give every rank the parameters and buffers of the rank `root`. Collective."""
        ...


class Shadow:
    """This rank without data: from here to `end` its gradients are those of the others' passes.

    Most loops clear gradients after a step, so what is left of the others' would be added to the first
    gradient of the next epoch. So its own are put aside, and come back.

    Args:
        passes: In which it takes part; not within one of them.
        keep_accumulated: Give back what no_sync() has accumulated too; else it is dropped.
    """

    def __init__(self, passes: UnevenPasses, *, keep_accumulated: bool) -> None:
        self._passes = passes
        passes.settle_interrupted()
        self._gradients = passes.gradients.keep()
        self._accumulated = set(passes.state.accumulated)
        if not keep_accumulated:
            for index in self._accumulated:
                self._gradients.pop(index, None)
            self._accumulated.clear()
        passes.gradients.restore({})

    def end(self) -> None:
        """Give this rank its own gradients back: the next backward adds to them."""
        self._passes.gradients.restore(self._gradients)
        self._passes.state.accumulated |= self._accumulated


def take_part_until_all_finished(
    passes: UnevenPasses,
    after_pass: Callable[[], object] | None,
    are_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Shadow the others' passes, then take over the model of those who went on longest. Collective.

    Args:
        passes: This rank has no data for them.
        after_pass: Called after each of them, with the means as gradients; None: this rank makes no steps.
        are_over: Asked before each of them whether other passes take their place, on all ranks alike.

    Returns:
        Whether all ranks are finished. Else these passes are over, and no model was taken over.
    """
    return _take_part(passes, after_pass, weight=0.0, keep_accumulated=False, are_over=are_over)


@contextlib.contextmanager
def joining(passes: UnevenPasses, *, divide_by_all: bool, throws: bool) -> Iterator[None]:
    """Within it, ranks may make different numbers of passes. Its end is collective.

    Args:
        passes: Some of them this rank may make without data.
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
    passes: UnevenPasses,
    after_pass: Callable[[], object] | None,
    *,
    weight: float,
    keep_accumulated: bool,
    are_over: Callable[[], bool] = lambda: False,
) -> bool:
    last_active = passes.active
    shadow = Shadow(passes, keep_accumulated=keep_accumulated)
    try:
        while True:
            if are_over():
                return False
            if not passes.shadow(weight=weight):
                break
            last_active = passes.active
            if after_pass is not None:
                after_pass()
            elif passes.shares_parameters:
                raise _cannot_step_along(passes.who)
    finally:
        shadow.end()
    take_over_model(passes, last_active)
    return True


def take_over_model(passes: UnevenPasses, active: Sequence[int]) -> None:
    """Give the ranks without data, which may have made no step, the model of one that had some. Collective.

    Args:
        passes: In which they took part.
        active: Who had data in the last pass for which somebody had; empty: there was none.
    """
    if 0 < len(active) < passes.world_size:
        passes.broadcast_model(active[0])


def _cannot_step_along(who: str) -> ConfigError:
    return ConfigError(
        "finish: this rank is out of data, and would not take part in the steps of the others.",
        where=who,
        seen="share_parameters=True: all ranks of a host step together",
        expected="finish(after_pass=...), or iterate(batches, after_pass), with what makes a step",
        hint="pass a function that makes the optimizer's step as in the loop",
    )
