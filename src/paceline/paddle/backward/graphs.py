"""Paddle's autograd, as `BackwardSync` needs it: the tensors of a forward, gradient hooks, and the end of
backward.

Paddle does not report three things by itself: which tensors a forward returned; that a parameter's gradient
is accumulated (and that other code has registered a hook later); and when the user's backward is over.

Every backward() goes through one function of Paddle, which is wrapped here. The wrapper counts the nesting
depth, to tell the user's backward from the inner ones of recompute and PyLayer. After the user's backward it
calls the functions registered with `at_end`; their exceptions reach the user unchanged. (Paddle's own hook
for the end of a backward turns every exception into a SystemError, and fires early if backward passes nest.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import paddle
from paddle.distribution import Distribution

from paceline.paddle import internals
from paceline.reducer.backward.state import EndOfBackward

# --- the tensors of a forward's output ---

_PLAIN = (str, bytes, int, float, complex, np.ndarray, np.generic, type(None))


def tensors_in(output: object) -> Iterator[paddle.Tensor]:
    for leaf in _leaves(output):
        if isinstance(leaf, paddle.Tensor):
            yield leaf


def may_hide_tensors(output: object) -> bool:
    return any(not isinstance(leaf, (paddle.Tensor, *_PLAIN)) for leaf in _leaves(output))


def _leaves(output: object) -> Iterator[object]:
    if isinstance(output, (list, tuple)):
        for item in output:
            yield from _leaves(item)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _leaves(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _leaves(getattr(output, field.name, None))
    elif isinstance(output, Distribution):
        yield from _leaves(vars(output))
    else:
        yield output


# --- hooks of parameters: ours, and those that other code registers after ours ---


class Listener(Protocol):
    def on_gradient(self, index: int) -> None: ...

    def note_hook_of_others(self, parameter: paddle.Tensor) -> None: ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener, parameters: Sequence[paddle.Tensor]) -> None:
    """Report every gradient of these parameters, by index, as long as the listener lives.

    Paddle never removes a hook, so the hook holds only a weak reference to the listener.
    """
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


# --- the begin and end of backward passes in this process ---


class _End(NamedTuple):
    end: Callable[[], None]
    before: Callable[[], None]


class _Calls(threading.local):
    """The backward calls of this thread.

    Attributes:
        depth: The nesting depth of backward passes: 0 outside, 2 in that of a recomputed block.
        roots: The tensors at which the innermost one begins.
        number: The number of the innermost one, of all that have begun in this thread.
        ends: Functions to call at the end of the outermost one.
        error: An exception raised within the graph, which Paddle replaces by an OSError; None: there is none.
    """

    depth = 0
    roots: Sequence[paddle.Tensor] = ()
    number = begun = 0
    error: Exception | None = None

    def __init__(self) -> None:
        self.ends: list[_End] = []


calls = _Calls()
_watch_lock = threading.Lock()
_is_watching = False


def watch_backwards() -> None:
    global _is_watching
    with _watch_lock:
        if not _is_watching:
            internals.wrap_run_backward(_watched)
            _is_watching = True


def _nothing() -> None: ...


def at_end(end: Callable[[], None], *, before: Callable[[], None] = _nothing) -> None:
    """Call `end` when the outermost backward of this thread is over; if the backward raises, drop it.

    Args:
        end: The function to call.
        before: Called before any `end`, because two wrapped models may share one backward. Must not raise.
    """
    calls.ends.append(_End(end, before))


def raise_after_backward(error: Exception) -> None:
    """Raise an error of the graph when backward is over, because Paddle would replace it by an OSError."""

    def end() -> None:
        raise error

    if not calls.depth:
        raise error
    at_end(EndOfBackward(end, _nothing))


def keep_as_it_is(error: Exception) -> None:
    if calls.depth:
        calls.error = error


def _watched(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @internals.untranslated
    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        depth, outer, number = calls.depth, calls.roots, calls.number
        has_grad = paddle.is_grad_enabled()
        try:
            calls.begun += 1
            calls.depth, calls.roots, calls.number = depth + 1, args[0], calls.begun
            result = run_backward(*args, **kwargs)
            calls.depth, calls.roots, calls.number = depth, outer, number
            if calls.ends and depth == 0:
                _call_ends()
            return result
        except BaseException as error:  # also from a signal handler just before `_call_ends`
            calls.depth, calls.roots, calls.number = depth, outer, number
            kept = calls.error
            if depth == 0:
                calls.ends.clear()
                calls.error = None
            # An exception at the end of a `with paddle.no_grad()` may leave gradients disabled for good.
            paddle.set_grad_enabled(has_grad)
            if kept is not None and isinstance(error, OSError):
                raise kept from None
            raise

    return run


def _call_ends() -> None:
    ends, calls.ends = calls.ends, []
    for each in ends:
        each.before()
    with contextlib.ExitStack() as stack:
        for each in reversed(ends):
            stack.callback(each.end)
