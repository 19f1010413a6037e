"""What torch.compile must know of the wrapper: that forward is not to be traced, and what it calls is.

And what the wrapper must know of it: whether it compiles backward, too, which then averages nothing.

As torch.compiler.disable(), which imports the compiler and so costs every program seconds. So the two marks
that it leaves are made here; where torch has others, it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from paceline.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function and all that it calls."""
    return _mark(function, is_recursive=True)


def untraced_itself(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function; what it calls is compiled all the same."""
    return _mark(function, is_recursive=False)


def refuse_compiled_autograd() -> None:
    """Refuse a backward that torch compiles, as torch's own class does, or a forward where it may come next.

    Of the hooks that average, such a backward calls some at other times than autograd, and some never.
    """
    # Not imported: a program that has not compiled anything has no such module, and need not wait for it.
    state = sys.modules.get("torch._dynamo.compiled_autograd")
    if state is None or not (state.compiled_autograd_enabled or state.in_compiled_autograd_region):
        return
    raise ConfigError(
        "DistributedDataParallel cannot average gradients of a backward that torch has compiled.",
        seen="compiled autograd is on",
        likely="torch._dynamo.config.compiled_autograd = True",
        hint="set it to False. A step with backward() in it can be compiled all the same: "
        "torch.compile then leaves backward() to autograd",
    )


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
