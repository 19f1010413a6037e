"""Queries of autograd: the tensors in the output of a forward, and which call of autograd runs a hook.

`reducer.backward.state` keeps what belongs to the graph of a forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from paceline.torch.model.torch_compile import refuse_compiled_autograd


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists, dicts, dataclasses, distributions, and classes of torch's pytree."""
    return iter([output]) if isinstance(output, torch.Tensor) else _tensors_within(output, set())


def may_hide_tensors(output: object) -> bool:
    """Whether it holds an object in which `tensors_in` does not look, and which may hold tensors."""
    if isinstance(output, torch.Tensor):
        return False
    return any(not isinstance(leaf, _PLAIN) for leaf in _leaves(output, set()))


def _tensors_within(output: object, entered: set[int]) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(output, entered) if isinstance(leaf, torch.Tensor))


def _leaves(output: object, entered: set[int]) -> Iterator[object]:
    for leaf in pytree.tree_leaves(output):
        if not (values := _values_of(leaf)):
            yield leaf
        elif id(leaf) not in entered:
            entered.add(id(leaf))
            yield from _leaves(values, entered)


def _values_of(leaf: object) -> list[object]:
    if isinstance(leaf, Distribution):
        return list(vars(leaf).values())
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name, None) for field in fields(leaf)]
    return []


_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None), Distribution)


def has_no_backward(output: object) -> bool:
    """Whether it has tensors, none of which requires a gradient, and no object that may hide one."""
    found = list(tensors_in(output))
    is_plain = all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(output))
    return is_plain and bool(found) and not any(tensor.requires_grad for tensor in found)


class RunningCall(Enum):
    """The kind of autograd call that runs a hook.

    UNKNOWN: the hook runs in autograd's thread for a device, while several threads are in calls of different
    kinds.
    """

    BACKWARD = "backward()"
    BACKWARD_OF_SOME = "backward(inputs=...)"
    GRAD = "autograd.grad()"
    UNKNOWN = "?"


BACKWARD, BACKWARD_OF_SOME, GRAD, UNKNOWN = RunningCall
"""Names of the module, because reading one from the class takes several times as long, in each backward."""


def running_call() -> RunningCall:
    """The innermost call of autograd on this thread's stack, or else the one of another thread that waits."""
    refuse_compiled_autograd()
    found = _innermost_call(sys._getframe(1))
    if found is not None:
        return _kind_of(found)
    waiting = {_kind_of(frame) for frame in _waiting_calls()}
    return waiting.pop() if len(waiting) == 1 else UNKNOWN


def roots_of_backward() -> list[Any]:
    """The nodes of the graph at which the running backward begins, found as in `running_call`.

    Empty: it is not known which call it is.
    """
    found = _innermost_call(sys._getframe(1))
    calls = [found] if found is not None else _waiting_calls()
    if len(calls) != 1:
        return []
    tensors = calls[0].f_locals.get("tensors", ())
    each = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    nodes = [getattr(tensor, "grad_fn", None) or getattr(tensor, "node", None) for tensor in each]
    return [node for node in nodes if node is not None]


def _waiting_calls() -> list[FrameType]:
    threads = sys._current_frames()
    threads.pop(threading.get_ident(), None)
    return [call for frame in threads.values() if (call := _innermost_call(frame)) is not None]


def _kind_of(call: FrameType) -> RunningCall:
    if call.f_code is torch.autograd.grad.__code__:
        return GRAD
    inputs = call.f_locals.get("inputs")  # torch 2.6 makes an empty tuple of None
    of_all = inputs is None or (isinstance(inputs, tuple) and not inputs)
    return BACKWARD if of_all else BACKWARD_OF_SOME


def inputs_of_grad() -> Sequence[object]:
    """The inputs of the running autograd.grad(), found as in `running_call`; empty: not known."""
    found = _innermost_call(sys._getframe(1))
    calls = [found] if found is not None else _waiting_calls()
    if len(calls) != 1 or calls[0].f_code is not torch.autograd.grad.__code__:
        return ()
    inputs = calls[0].f_locals.get("inputs", ())
    return inputs if isinstance(inputs, (tuple, list)) else (inputs,)


def _innermost_call(frame: FrameType | None) -> FrameType | None:
    grad, backward = torch.autograd.grad.__code__, torch.autograd.backward.__code__
    while frame is not None and frame.f_code is not grad and frame.f_code is not backward:
        frame = frame.f_back
    return frame
