"""Waits at the exit of the process until torch's Gloo threads are idle.

A Gloo thread sets the result of a collective before it releases the tensors, for which it needs the GIL. If
the interpreter starts to shut down in between, Python 3.13 and older unwind that thread, and C++ aborts the
process after a successful training (pytorch#190489). Destroying the group does not end these threads once a
DDP has existed.
"""

from __future__ import annotations

import atexit
import platform
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
LONGEST_S = 1.0  # for threads that wait for something other than a core, such as a missing rank
LONGEST_STARVED_S = 30.0  # for threads that are ready to run but get no core
_LOOK_EVERY_S = 0.0005
_LOOKS = 3  # idle looks in a row, because a thread may be between two locks at one look
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())


def wait_at_exit() -> None:
    """Register an exit handler that waits for Gloo's threads, if there are any.

    It waits at most 1 s, not counting time in which the threads are ready to run but get no core; at most
    30 s with that. Call this early: handlers that are registered later run earlier, and may still use Gloo.
    """
    atexit.register(_wait_until_idle)


def _wait_until_idle() -> None:
    threads = [task for task in _tasks() if _read(task / "comm").strip() == _NAME]
    now = time.monotonic()
    until_s = now + max(LONGEST_S, LONGEST_STARVED_S)
    quiet, blocked_s = 0, 0.0
    while threads and quiet < _LOOKS and blocked_s < LONGEST_S and now < until_s:
        busy = [thread for thread in threads if not _is_idle(thread)]
        quiet = 0 if busy else quiet + 1
        time.sleep(_LOOK_EVERY_S)  # releases the GIL, which the threads may need
        before, now = now, time.monotonic()
        if busy and not any(map(_is_ready_to_run, busy)):
            # This thread may get no core either; so a long gap between two looks counts only in part.
            blocked_s += min(now - before, 10 * _LOOK_EVERY_S)


def _is_ready_to_run(thread: Path) -> bool:
    return _read(thread / "stat").rpartition(")")[2].split()[:1] in (["R"], ["D"])


def _is_idle(thread: Path) -> bool:
    """Whether a thread waits for work, or has ended.

    A thread that waits for work waits on a futex without a deadline. While it waits for the GIL or for
    another rank, it has a deadline.
    """
    call = _read(thread / "syscall").split()
    if _FUTEX is None or not call:  # this kernel does not show the system calls of threads
        state = _read(thread / "stat").rpartition(")")[2].split()
        return not state or state[0] == "S"
    return call[0] == _FUTEX and int(call[4], 16) == 0


def _tasks() -> list[Path]:
    try:
        return list(Path("/proc/self/task").iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
