"""Ranks that run out of data before the others, and then shadow the others' backward passes.

Such a rank takes part in the backward passes of the others without gradients, with a weight of 0 (or 1, for
`joining` with `divide_by_all`), until no rank has data left. Each rank reports this in the status that ends a
backward, so no further messages are needed. Then the rank gets the model of a rank that went on longest, and
its own gradients are restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.reducer.backward.backward_sync import BackwardSync


class Shadow:
    """The time in which this rank has no data: until `end`, its gradients are those of the others' backward.

    Most loops clear gradients after a step, so the others' gradients would otherwise be added to the first
    gradient of the next epoch. Therefore this rank's own gradients are set aside and restored by `end`.
    """

    def __init__(self, backward_sync: BackwardSync[Any], *, keep_accumulated: bool) -> None:
        self._backward_sync = backward_sync
        backward_sync.settle_interrupted()
        self._gradients = backward_sync.gradients.keep()
        self._accumulated = set(backward_sync.state.accumulated)
        if not keep_accumulated:
            for index in self._accumulated:
                self._gradients.pop(index, None)
            self._accumulated.clear()
        backward_sync.gradients.restore({})

    def end(self) -> None:
        self._backward_sync.gradients.restore(self._gradients)
        self._backward_sync.state.accumulated |= self._accumulated


def take_part_until_all_finished(
    backward_sync: BackwardSync[Any],
    after_pass: Callable[[], object] | None,
    are_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Shadow the others' backward passes, then take over the model of a last active rank. Collective.

    Returns:
        Whether all ranks are finished. If not, `are_over` ended the shadowing, and no model was taken over.
    """
    return _take_part(backward_sync, after_pass, weight=0.0, keep_accumulated=False, are_over=are_over)


@contextlib.contextmanager
def joining(backward_sync: BackwardSync[Any], *, divide_by_all: bool, throws: bool) -> Iterator[None]:
    """Let ranks make different numbers of backward passes in this context. Leaving it is collective."""
    before, backward_sync.refuses_uneven = backward_sync.refuses_uneven, throws
    try:
        yield
        _take_part(backward_sync, None, weight=1.0 if divide_by_all else 0.0, keep_accumulated=True)
    finally:
        backward_sync.refuses_uneven = before


def _take_part(
    backward_sync: BackwardSync[Any],
    after_pass: Callable[[], object] | None,
    *,
    weight: float,
    keep_accumulated: bool,
    are_over: Callable[[], bool] = lambda: False,
) -> bool:
    last_active = backward_sync.active
    shadow = Shadow(backward_sync, keep_accumulated=keep_accumulated)
    try:
        while True:
            if are_over():
                return False
            if not backward_sync.shadow(weight=weight):
                break
            last_active = backward_sync.active
            if after_pass is not None:
                after_pass()
            elif backward_sync.shares_parameters:
                raise _cannot_step_along(backward_sync.who)
    finally:
        shadow.end()
    take_over_model(backward_sync, last_active)
    return True


def take_over_model(backward_sync: BackwardSync[Any], active: Sequence[int]) -> None:
    """Give ranks without data, which may have made no step, the model of a rank with data. Collective."""
    if 0 < len(active) < backward_sync.world_size:
        backward_sync.broadcast_model(active[0])


def _cannot_step_along(who: str) -> ConfigError:
    return ConfigError(
        "finish: this rank is out of data, and would not take part in the steps of the others.",
        where=who,
        seen="share_parameters=True: all ranks of a host step together",
        expected="finish(after_pass=...), or iterate(batches, after_pass), with what makes a step",
        hint="pass a function that makes the optimizer's step as in the loop",
    )
