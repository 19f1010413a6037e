"""Signals that ask the job to stop: SIGTERM, and SIGUSR1, which schedulers send as a warning.

The handler only records the signal. This rank reports it with its next backward. All ranks then know that
they stop, after the same step: see `BackwardSync.is_stopping`.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, final

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STATUS = os.EX_TEMPFAIL
"""Of a job that such a signal stopped and that can be resumed; 75, as in sysexits.h."""


@final
class StopSignals:
    """Records the signals while any object listens; see `stop_signals`.

    A repeated signal changes nothing: service managers send SIGTERM to each process of a job, the launcher
    passes it on as well, and Slurm repeats it. The program's own handler is called after this one.

    Attributes:
        received: The first signal; 0 if none was received.
    """

    def __init__(self) -> None:
        self.received = 0
        self._listeners = 0
        self._before: dict[int, Any] = {}
        self._masks = threading.local()  # of threads that fork
        self._looks_at_forks = False

    def listen(self) -> None:
        """Catch the signals from now on, if this is the main thread; no other thread can."""
        self._listeners += 1
        if not self._looks_at_forks:
            self._looks_at_forks = True
            # Not in processes that never listen, such as launchers: if a signal handler raises while such a
            # function runs during a fork, Python drops the exception, even a KeyboardInterrupt.
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._restore_mask,
                after_in_child=self._after_fork_in_child,
            )
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._note) or signal.SIG_DFL for signum in SIGNALS}

    def leave(self) -> None:
        """Undo one `listen`. After the last one, the program's handlers are restored."""
        self._listeners -= 1
        if not self._listeners and threading.current_thread() is threading.main_thread():
            self._stop_catching()

    def _stop_catching(self) -> None:
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._note:  # else the program has installed its own since
                signal.signal(signum, before)
        self._before, self.received = {}, 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum, signal.SIG_DFL)
        self.received = self.received or signum
        if callable(before):
            before(signum, frame)

    # A forked child, such as a DataLoader worker, must end by these signals as it would without this class.
    # Python drops signals that arrive before the child runs, so they are blocked until it has its handlers.

    def _before_fork(self) -> None:
        if self._before:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _restore_mask(self) -> None:
        if (mask := self._masks.__dict__.pop("before", None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _after_fork_in_child(self) -> None:
        self._stop_catching()
        self._listeners = 0
        self._restore_mask()


stop_signals = StopSignals()
"""The stop signals of this process."""
