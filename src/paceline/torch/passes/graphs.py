"""Autograd's graph, as far as passes ask: the tensors that a forward returned, and whose call runs a hook.

`reducer.graphs` keeps what belongs to the graph of a forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FrameType

import torch
from torch.utils import _pytree as pytree


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists, dicts, dataclasses and what is registered with torch's pytree."""
    leaves = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


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
    """The innermost call of autograd on this thread's stack; or the one that waits for this thread."""
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
