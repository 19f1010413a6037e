"""One thread per group that makes its asynchronous calls, in call order.

A group's collectives must run in the same order on every rank, so one thread and one queue are exactly what
they need. Synchronous calls skip the queue while it is empty, and wait for it otherwise. Imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol


class QueuedCall(Protocol):
    """What the queue runs: `run` never raises, and keeps what went wrong for whoever waits."""

    @property
    def is_over(self) -> bool: ...

    def run(self) -> None: ...


class CallQueue:
    """Starts its thread with the first call. `close()` ends it; so does the end of the process.

    Args:
        name: Of the thread, for stack dumps.
        around: Makes a context in which all calls run.
    """

    def __init__(
        self,
        name: str,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._name = name
        self._around = around
        self._calls: queue.SimpleQueue[QueuedCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        # The newest call; None when the queue is known to be empty. Read without the guard by callers
        # that are about to run synchronously.
        self.newest: QueuedCall | None = None

    def is_empty(self) -> bool:
        with self._guard:
            if self.newest is not None and self.newest.is_over:
                self.newest = None
            return self.newest is None

    def submit(self, call: QueuedCall) -> None:
        if threading.current_thread() is self._thread:
            # A callback of a call that is over makes another one, and may wait for it right here.
            call.run()
            return
        with self._guard:
            if self._thread is None:
                # A daemon, so that a rank that leaves without closing its groups can exit at all.
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self.newest = call
            self._calls.put(call)

    def close(self) -> None:
        """Run what is queued, then end the thread. Each call has its deadline, so this ends too."""
        with self._guard:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._calls.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        with self._around():
            while (call := self._calls.get()) is not None:
                call.run()
                del call  # what the last call holds must not live until the next one
