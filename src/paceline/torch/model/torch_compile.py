"""Marks the wrapper's functions for torch.compile, and refuses a backward that torch.compile has compiled.

torch.compile must not trace the wrapper's forward, but must compile the module that forward calls.
torch.compiler.disable() would set the marks for this, but it imports the compiler, which takes seconds in
every program. So the two marks that it sets are set here; if torch has other ones, it is called.
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
    """Keep torch.compile from tracing a function; functions that it calls are still compiled."""
    return _mark(function, is_recursive=False)


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on, which torch's own class also refuses. Called in forward and backward.

    A compiled backward calls some of the hooks that average at other times than autograd, and some never.
    """
    # Looked up instead of imported: a program that has compiled nothing does not pay for the import.
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
        frames.set_code_exec_strategy(function.__code__, strategy)  # for calls from Python
    except AttributeError:
        disabled: _Function = torch.compiler.disable(function, recursive=is_recursive)  # type: ignore[no-untyped-call]
        return disabled
    marks = {"": True, "_msg": "it synchronises with other ranks", "_recursive": is_recursive}
    for name, value in marks.items():  # for calls from a function that is being traced
        setattr(function, f"_torchdynamo_disable{name}", value)
    return function
