"""A wrapper of the framework around ours, or ours around one: both average, in an order that timing decides.

What one of them reads may be a mean of the other already, or this rank's own gradient: 1 and 2 give 1.25 as
well as 1.5. So it is refused, with the line to remove.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CodeType, FrameType

from paceline.errors import ConfigError


def inner_error(ours: str, theirs: str, name: str, *, by: str = "", cure: str = "") -> ConfigError:
    """The module that is to be wrapped is, or has in it, a wrapper of the framework."""
    where = f"at '{name}'" if name else "around the whole model"
    return ConfigError(
        f"{ours}: the model is wrapped already, by {theirs}, {where}; its gradients would be averaged twice.",
        likely=f"{by} has wrapped it"
        if by
        else f"the line that wraps it in {theirs} is still there, or a library has wrapped it",
        hint=cure or f"remove that line; or pass the model itself, `wrapped.module`, and use no {theirs}",
    )


def outer_error(ours: str, theirs: str, seen: str, *, by: str = "", cure: str = "") -> ConfigError:
    """A wrapper of the framework is around ours."""
    return ConfigError(
        f"{theirs} is around a model that {ours} has wrapped already; its gradients would be averaged twice.",
        seen=seen,
        likely=f"{by} wraps the model as well"
        if by
        else f"a library wraps the model as well, as `accelerator.prepare(model)` does, or a line that "
        f"wraps it in {theirs} is still there",
        hint=cure
        or f"remove that line, or the one with {ours}; with Accelerate leave the model out: "
        "`optimizer, loader = accelerator.prepare(optimizer, loader)`",
    )


def callers(codes: Collection[CodeType]) -> Iterator[object]:
    """The `self` of each call of these functions on this thread's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            yield frame.f_locals.get("self")
        frame = frame.f_back
