"""Which call of autograd runs the hook that asks. Autograd itself does not tell."""

from __future__ import annotations

import sys
from enum import Enum
from types import FrameType

import torch


class RunningCall(Enum):
    """What the user called.

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
            of_all = frame.f_locals.get("inputs") is None
            return RunningCall.BACKWARD if of_all else RunningCall.BACKWARD_OF_SOME
        frame = frame.f_back
    return RunningCall.UNKNOWN
