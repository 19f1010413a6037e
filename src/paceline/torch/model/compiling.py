"""What torch.compile must know of the wrapper: that forward is not to be traced, and what it calls is.

As torch.compiler.disable(), which imports the compiler and so costs every program seconds. So the two marks
that it leaves are made here; where torch has others, it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function and all that it calls."""
    return _mark(function, is_recursive=True)


def untraced_itself(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function; what it calls is compiled all the same."""
    return _mark(function, is_recursive=False)


def _mark(function: _Function, *, is_recursive: bool) -> _Function:
    try:
        frames = torch._C._dynamo.eval_frame
        skip, compile_ = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if is_recursive else compile_)
        frames.set_code_exec_strategy(function.__code__, strategy)  # when Python calls it
    except AttributeError:
        disabled: _Function = torch.compiler.disable(function, recursive=is_recursive)  # type: ignore[no-untyped-call]
        return disabled
    marks = {"": True, "_msg": "it synchronises with other ranks", "_recursive": is_recursive}
    for name, value in marks.items():  # when what is being traced calls it
        setattr(function, f"_torchdynamo_disable{name}", value)
    return function
