"""The process that the user sees, and that leaves no process behind.

Two processes watch each other. The guardian (this one, whose pid the user knows) starts the supervisor and
passes signals on to it. At the end it ends all processes that are left below itself: as a child subreaper it
inherits every process whose parent has died, also those in a session of their own. If the supervisor is
killed, the guardian cleans up. If the guardian is killed, the kernel signals the supervisor, which cleans up.
If both are killed at once, the kernel still kills every rank.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from paceline.launch.memory_file import read_memory_file
from paceline.launch.output import Screen, say
from paceline.launch.plan import Plan
from paceline.launch.process_tree import (
    adopt_orphans,
    descendants,
    describe,
    die_with_parent,
    kill_descendants,
    reap_children,
    send,
    wait_readable,
)
from paceline.launch.supervise import Supervisor

_PASSED_ON = (signal.SIGWINCH, signal.SIGUSR1, signal.SIGUSR2)
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGTSTP, *_PASSED_ON)
# Wrappers pass on a Ctrl-C that the terminal has also sent to this process, and timeout(1) signals both this
# process and its group. A person takes longer for a second Ctrl-C.
_SECOND_SIGNAL_AFTER_S = 0.3


def run_guarded(plan: Plan, lifelines: Sequence[int] = ()) -> int:
    """Run a plan to its end, and leave no process behind.

    Call it from the main thread of a process that does nothing else.

    Args:
        plan: What to run.
        lifelines: Descriptors; when one of them becomes readable or ends, the job is killed.

    Returns:
        The exit status of the job.
    """
    guardian = _Guardian(plan, lifelines)
    return guardian.run()


def guard(plan_fd: int, lifeline: int, parent: int) -> None:
    """Run a plan as long as the process that called `spawn` lives; the entry point of its guardian."""
    plan: Plan = pickle.loads(read_memory_file(plan_fd))
    lifelines = [lifeline]
    # A fork of the parent may hold the other end of the lifeline; a pidfd refers to the parent alone.
    with suppress(OSError):  # Linux before 5.3, or the parent has ended, which the lifeline shows too
        lifelines.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        sys.exit(1)
    sys.exit(run_guarded(plan, lifelines))


class _Guardian:
    def __init__(self, plan: Plan, lifelines: Sequence[int]) -> None:
        self._plan = plan
        self._lifelines = list(lifelines)
        self._supervisor = 0
        self._status: int | None = None  # of the supervisor, once it has ended
        self._first_stop_at: float | None = None

    def run(self) -> int:
        adopt_orphans()
        wakeup = _catch_signals(_CAUGHT)
        self._supervisor = _fork_supervisor(self._plan)
        while self._status is None:
            ready = wait_readable([wakeup, *self._lifelines])
            if not ready.isdisjoint(self._lifelines):
                kill_descendants()
                return 128 + signal.SIGKILL
            for signum in os.read(wakeup, 512):
                self._on_signal(signum)
        unkillable = kill_descendants()  # none is left, unless the supervisor was killed
        if unkillable:
            say(f"paceline: could not end {', '.join(map(describe, unkillable))}")
        return self._exit_status()

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            self._status = reap_children().get(self._supervisor, self._status)
        elif signum == signal.SIGTSTP:
            _suspend()
        elif signum in _PASSED_ON:
            send(self._supervisor, signum)
        elif self._first_stop_at is None:
            self._first_stop_at = time.monotonic()
            send(self._supervisor, signum)
        # Schedulers repeat SIGTERM at the end of the time that they allow a job to save its work.
        elif signum != signal.SIGTERM and time.monotonic() - self._first_stop_at > _SECOND_SIGNAL_AFTER_S:
            kill_descendants()
            say(f"paceline: second {signal.Signals(signum).name}: every rank was killed")
            self._status = 128 + signum

    def _exit_status(self) -> int:
        assert self._status is not None
        if self._status >= 0:
            return self._status
        say(f"paceline: the supervisor was killed by {signal.Signals(-self._status).name}; so was every rank")
        return 128 - self._status


def _catch_signals(signals: Sequence[int]) -> int:
    wakeup, writer = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in signals:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # ignored by nohup, or a shell's background job
            signal.signal(signum, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # `paceline run` has blocked some until here
    return wakeup


def _nothing(signum: int, frame: FrameType | None) -> None: ...


def _fork_supervisor(plan: Plan) -> int:
    guardian = os.getpid()
    terminal_group = _terminal_group(plan)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # Python was started without it
            stream.flush()
    # Until the supervisor has its own handlers, a signal to it would be written to our wake-up pipe.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _supervise(plan, guardian, terminal_group)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _supervise(plan: Plan, guardian: int, terminal_group: int) -> int:
    os.setpgid(0, 0)  # so that the terminal's Ctrl-C arrives once, through the guardian
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # and writing to the terminal does not stop us
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    adopt_orphans()

    def on_sigterm(signum: int, frame: FrameType | None) -> None:
        # Runs even while a full pipe blocks this process's output.
        if os.getppid() != guardian:
            kill_descendants()
            os._exit(128 + signal.SIGKILL)

    signal.signal(signal.SIGTERM, on_sigterm)
    die_with_parent(guardian, signal.SIGTERM)
    return Supervisor(plan, Screen(), terminal_group).run()


def _terminal_group(plan: Plan) -> int:
    """The process group that reads the terminal; 0 if no terminal is read."""
    if not plan.passes_stdin:
        return 0
    with suppress(OSError):
        if os.tcgetpgrp(0) == os.getpgrp():
            return os.getpgrp()
    return 0


def _suspend() -> None:
    ours = descendants(os.getpid())
    for pid in ours:
        send(pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for pid in ours:
        send(pid, signal.SIGCONT)
