"""Waits at the end of the process until torch's Gloo threads are idle.

A thread of Gloo's sets the result of a collective before it lets go of the tensors, for which it needs the
interpreter's lock. If the program has its result and the interpreter begins to end in between, Python 3.13
and older unwind that thread, and C++ aborts the process after a good training (pytorch#190489). Destroying
the group does not end these threads once there was a DDP.
"""

from __future__ import annotations

import atexit
import platform
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
LONGEST_S = 1.0  # for threads that wait for something else than a core, such as a rank that does not come
LONGEST_STARVED_S = 30.0  # for threads that are ready to run, and get no core
_LOOK_EVERY_S = 0.0005
_LOOKS = 3  # in a row, for a thread that is between two locks when it is looked at
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())


def wait_at_exit() -> None:
    """Have the end of this process wait for them; where there are none it waits for nothing.

    At most 1 s, not counting the time for which they are ready to run and the machine gives them no core;
    30 s with that. To be called early: handlers that are registered later run before, and may still use Gloo.
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
        time.sleep(_LOOK_EVERY_S)  # gives up the interpreter's lock, which they may want
        before, now = now, time.monotonic()
        if busy and not any(map(_is_ready_to_run, busy)):
            # This thread may get no core either, and then the others were not seen for so long.
            blocked_s += min(now - before, 10 * _LOOK_EVERY_S)


def _is_ready_to_run(thread: Path) -> bool:
    return _read(thread / "stat").rpartition(")")[2].split()[:1] in (["R"], ["D"])


def _is_idle(thread: Path) -> bool:
    """Whether a thread waits for work, or has ended.

    Then it waits for a condition, without a deadline. While it waits for the interpreter's lock, or for
    another rank, it has one.
    """
    call = _read(thread / "syscall").split()
    if _FUTEX is None or not call:  # this kernel does not show the calls of threads
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
