"""The hooks of parameters: ours, and what we learn of those that others register after them.

Paddle never lets go of such a hook, so it must not hold what it belongs to.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import paddle

from paceline.paddle import internals


class Listener(Protocol):
    """The passes of one wrapped model."""

    def on_gradient(self, index: int) -> None:
        """A parameter's gradient is accumulated."""
        ...

    def note_hook_of_others(self, parameter: paddle.Tensor) -> None:
        """Somebody has registered a hook, of any parameter, that will be called after ours."""
        ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener, parameters: Sequence[paddle.Tensor]) -> None:
    """Tell of every gradient of these parameters, by their number, as long as the listener lives."""
    _watch_hooks_of_others()
    _listeners.add(listener)
    for index, parameter in enumerate(parameters):
        internals.on_gradient(parameter, _weak_hook(listener, index))


@functools.cache
def _watch_hooks_of_others() -> None:
    def note(parameter: paddle.Tensor) -> None:
        for listener in list(_listeners):
            listener.note_hook_of_others(parameter)

    internals.watch_hooks_of_others(note)


def _weak_hook(listener: Listener, index: int) -> Callable[[], None]:
    find = weakref.ref(listener)

    def hook() -> None:
        found = find()
        if found is not None:
            found.on_gradient(index)

    return hook
