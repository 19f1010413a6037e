"""Autograd's graph, as far as passes ask: the tensors that a forward returned, and whose call runs a hook.

`reducer.graphs` keeps what belongs to the graph of a forward.
"""

from __future__ import annotations

import sys
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

    On a GPU hooks run in a thread of their own, where it cannot be seen: UNKNOWN.
    """

    BACKWARD = "backward()"
    BACKWARD_OF_SOME = "backward(inputs=...)"
    GRAD = "autograd.grad()"
    UNKNOWN = "?"


def running_call() -> RunningCall:
    """The innermost call of autograd on this thread's stack."""
    grad, backward = torch.autograd.grad.__code__, torch.autograd.backward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is grad:
            return RunningCall.GRAD
        if frame.f_code is backward:
            inputs = frame.f_locals.get("inputs")  # torch 2.6 makes an empty tuple of None
            of_all = inputs is None or (isinstance(inputs, tuple) and not inputs)
            return RunningCall.BACKWARD if of_all else RunningCall.BACKWARD_OF_SOME
        frame = frame.f_back
    return RunningCall.UNKNOWN
