"""Autograd's graph, as far as passes ask: the tensors that a forward returned, and whose call runs a hook.

`reducer.passes.graphs` keeps what belongs to the graph of a forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FrameType

import torch
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from paceline.torch.model.compiling import refuse_compiled_autograd


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """All in tuples, lists, dicts, dataclasses, distributions and what is registered with torch's pytree."""
    return iter([output]) if isinstance(output, torch.Tensor) else _tensors_within(output, set())


def _tensors_within(output: object, entered: set[int]) -> Iterator[torch.Tensor]:
    """The same, without objects that have been entered: they may refer to themselves."""
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif (values := _values_of(leaf)) and id(leaf) not in entered:
            entered.add(id(leaf))
            yield from _tensors_within(values, entered)


def _values_of(leaf: object) -> list[object]:
    """What an object holds, if it is of a kind that may be an output."""
    if isinstance(leaf, Distribution):
        return list(vars(leaf).values())
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name, None) for field in fields(leaf)]
    return []


_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None), Distribution)


def has_no_backward(output: object) -> bool:
    """Whether there are tensors in it, none that needs a gradient, and no object that may hide one."""
    found = list(tensors_in(output))
    is_plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(output))
    return is_plain and bool(found) and not any(tensor.requires_grad for tensor in found)


class RunningCall(Enum):
    """Which call of autograd runs the hook that asks. Autograd itself does not tell.

    UNKNOWN: on a device, whose hooks run in a thread of their own, while several threads are in such calls,
    and not in the same.
    """

    BACKWARD = "backward()"
    BACKWARD_OF_SOME = "backward(inputs=...)"
    GRAD = "autograd.grad()"
    UNKNOWN = "?"


def running_call() -> RunningCall:
    """The innermost call of autograd on this thread's stack; or the one that waits for this thread.

    Raises:
        ConfigError: What runs is no graph of autograd's, but a program that torch has compiled of it.
    """
    refuse_compiled_autograd()
    found = _innermost_call(sys._getframe(1))
    if found is not None:
        return found
    threads = sys._current_frames()
    threads.pop(threading.get_ident(), None)
    waiting = {call for frame in threads.values() if (call := _innermost_call(frame)) is not None}
    return waiting.pop() if len(waiting) == 1 else RunningCall.UNKNOWN


def _innermost_call(frame: FrameType | None) -> RunningCall | None:
    grad, backward = torch.autograd.grad.__code__, torch.autograd.backward.__code__
    while frame is not None:
        if frame.f_code is grad:
            return RunningCall.GRAD
        if frame.f_code is backward:
            inputs = frame.f_locals.get("inputs")  # torch 2.6 makes an empty tuple of None
            of_all = inputs is None or (isinstance(inputs, tuple) and not inputs)
            return RunningCall.BACKWARD if of_all else RunningCall.BACKWARD_OF_SOME
        frame = frame.f_back
    return None
