"""When a backward begins and ends, in this process.

The one idea: Paddle has one function through which every backward() goes. Around it we count how deep we
are, so that the inner backwards of recompute and PyLayer are told from the user's, and what must happen at
the end of the user's happens after it, where an exception reaches the user as it is. (Paddle's own hook at
the end of a backward turns every exception into a SystemError, and fires early where backwards nest.)
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from paceline.paddle import internals


class _Calls(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []


_calls = _Calls()
_lock = threading.Lock()
_is_watching = False


def watch() -> None:
    """Begin to watch, if nobody has."""
    global _is_watching
    with _lock:
        if not _is_watching:
            internals.wrap_run_backward(_watched)
            _is_watching = True


def depth() -> int:
    """How many backwards this thread is in: 0 outside, 2 in that of a recomputed block."""
    return _calls.depth


def at_end(end: Callable[[], None]) -> None:
    """Call `end` when the outermost backward of this thread is over and has not raised."""
    _calls.ends.append(end)


def _watched(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        _calls.depth += 1
        try:
            result = run_backward(*args, **kwargs)
        except BaseException:
            if _calls.depth == 1:
                _calls.ends.clear()
            raise
        finally:
            _calls.depth -= 1
        if _calls.ends and _calls.depth == 0:
            _call_ends()
        return result

    return run


def _call_ends() -> None:
    """All of them, even if one raises: two wrapped models may share one backward."""
    ends, _calls.ends = _calls.ends, []
    with contextlib.ExitStack() as stack:
        for end in reversed(ends):
            stack.callback(end)
