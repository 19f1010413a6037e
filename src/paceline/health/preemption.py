"""Signals that ask the job to stop: SIGTERM, and SIGUSR1, by which schedulers warn.

The handler only notes the signal. This rank reports it with its next backward, and from that on all ranks
know that they stop, after the same step: see `BackwardSync.is_stopping`.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, final

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_STATUS = os.EX_TEMPFAIL
"""Of a job that was stopped by them and can be resumed; 75, as in sysexits.h."""


@final
class StopSignals:
    """Notes the signals while anything listens; see `stop_signals`.

    A signal that comes again changes nothing: service managers send SIGTERM to each process of a job, the
    launcher passes it on as well, and Slurm repeats it. The program's own handler is called after this one.

    Attributes:
        received: The first of them; 0: none has come.
    """

    def __init__(self) -> None:
        self.received = 0
        self._listeners = 0
        self._pid = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Catch the signals from now on, if this is the main thread, which alone can."""
        self._listeners += 1
        if not self._before and threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            self._before = {signum: signal.signal(signum, self._note) or signal.SIG_DFL for signum in SIGNALS}

    def leave(self) -> None:
        """What has called `listen` is gone: after the last one, all is as it was."""
        self._listeners -= 1
        is_main = threading.current_thread() is threading.main_thread()
        if self._listeners or not is_main or os.getpid() != self._pid:
            return
        for signum, before in self._before.items():
            if signal.getsignal(signum) == self._note:  # else the program has put its own there since
                signal.signal(signum, before)
        self._before, self.received = {}, 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        before = self._before.get(signum, signal.SIG_DFL)
        if os.getpid() != self._pid:  # a forked child, such as a worker: it ends by the signal as it did
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)
            return
        self.received = self.received or signum
        if callable(before):
            before(signum, frame)


stop_signals = StopSignals()
"""Of this process."""
