"""Reports to the other ranks, on every group of this process, that this rank raises or exits.

Without this, the others would notice an uncaught exception only at the end of the process (which takes a
second in a process with torch in it), and would never receive its text.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable
from types import TracebackType

from paceline import _core
from paceline.errors import leave_out_inner_frames
from paceline.health.stop_signals import EXIT_STATUS
from paceline.rendezvous.deadline import Deadline

_live: weakref.WeakSet[_core.HostGroup] = weakref.WeakSet()
_exit_warnings: list[weakref.WeakMethod[Callable[[], object]]] = []
_last_exit_warnings: list[weakref.WeakMethod[Callable[[], object]]] = []
_at_failure: list[weakref.WeakMethod[Callable[[BaseException], object]]] = []
_installed_in = 0  # a process id; a forked child loses multiprocessing's list of finalizers


def watch(core: _core.HostGroup) -> None:
    """Close the group when this process exits, and abort it when an exception ends this process."""
    install()
    _live.add(core)


def announce(error: BaseException) -> None:
    """Report to the other ranks of all groups that this one raised: they raise too, quoting it.

    For code that catches exceptions of a rank's program and ends it, as a launcher's worker does. Not
    collective; does not block. A group that was aborted already keeps its first reason.
    """
    if _leaves_in_good_order(error):
        return
    for core in list(_live):
        announce_in(core, error)
    for reference in _at_failure:
        if (report := reference()) is not None:
            report(error)


def announce_in(core: _core.HostGroup, error: BaseException) -> None:
    if not _leaves_in_good_order(error):
        core.abort(f"{type(error).__name__}: {error}")


def _leaves_in_good_order(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0, EXIT_STATUS)


def at_failure(report: Callable[[BaseException], object]) -> None:
    """Call this method when an exception ends this rank's program, as long as its object lives.

    For reports to ranks that share no memory with this one. It must not block.
    """
    install()
    _at_failure[:] = [each for each in _at_failure if each() is not None]
    _at_failure.append(weakref.WeakMethod(report))


def close_all() -> None:
    """Close all groups of this process. Not collective."""
    for core in list(_live):
        core.close()


def before_leaving(exit_warning: Callable[[], object], *, is_last: bool = False) -> None:
    """Call this method at the end of the process, unless an exception ends it, as long as its object lives.

    Methods are called while the groups of the process are still open, in the order of registration; those
    with `is_last` come after all others.
    """
    exit_warnings = _last_exit_warnings if is_last else _exit_warnings
    exit_warnings[:] = [known for known in exit_warnings if known() is not None]
    exit_warnings.append(weakref.WeakMethod(exit_warning))


def _end() -> None:
    # an exception in one exit warning must not keep the others from being called
    with contextlib.ExitStack() as rest:
        rest.callback(close_all)
        if getattr(sys, "last_value", None) is None:
            # an ExitStack calls its last callback first
            for known in reversed((*_exit_warnings, *_last_exit_warnings)):
                if (exit_warning := known()) is not None:
                    rest.callback(exit_warning)


def _leave() -> None:
    """At the end of the interpreter: no thread may still be inside the core when it is unloaded."""
    _end()  # this ends the calls of other threads
    deadline = Deadline(2.0)
    while _core.calls_under_way() and not deadline.is_over():
        time.sleep(0.001)


def install() -> None:
    """Install the hooks; repeated calls do nothing."""
    global _installed_in
    if _installed_in == os.getpid():
        return
    _installed_in = os.getpid()
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        announce(error)
        leave_out_inner_frames(error)
        previous(kind, error, error.__traceback__ or traceback)

    sys.excepthook = excepthook
    atexit.register(_leave)
    # Children of multiprocessing end without atexit, and multiprocessing catches what their target raises.
    multiprocessing.util.Finalize(None, _end, exitpriority=100)
