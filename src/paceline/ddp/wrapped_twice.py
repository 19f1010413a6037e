"""Detects a wrapper of the framework around ours, or ours around one: both would average the gradients.

Each wrapper may read a mean of the other or this rank's own gradient, depending on timing: with gradients 1
and 2 the result may be 1.25 as well as 1.5. So the model is refused, and the error names the line to remove.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CodeType, FrameType

from paceline.errors import ConfigError


def inner_error(ours: str, theirs: str, name: str, *, by: str = "", cure: str = "") -> ConfigError:
    """The error if the module to be wrapped is, or contains, a wrapper of the framework."""
    where = f"at '{name}'" if name else "around the whole model"
    return ConfigError(
        f"{ours}: the model is wrapped already, by {theirs}, {where}; its gradients would be averaged twice.",
        likely=f"{by} has wrapped it"
        if by
        else f"the line that wraps it in {theirs} is still there, or a library has wrapped it",
        hint=cure or f"remove that line; or pass the model itself, `wrapped.module`, and use no {theirs}",
    )


def outer_error(ours: str, theirs: str, seen: str, *, by: str = "", cure: str = "") -> ConfigError:
    """The error if a wrapper of the framework is around ours."""
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
    """The `self` of each call of these functions on this thread's stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            yield frame.f_locals.get("self")
        frame = frame.f_back
