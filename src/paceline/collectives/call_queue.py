"""A queue and a thread per group, which makes the group's asynchronous calls in call order.

A group's collectives must run in the same order on every rank, so there is one thread and one queue.
Synchronous calls skip the queue while it is empty, and wait for it otherwise.

A signal handler may interrupt the main thread anywhere in this module, and make a call itself. So the guard
is reentrant, and a thread that finds a change of its own half done raises.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from paceline.errors import CollectiveError
from paceline.rendezvous.resource_limits import start_thread


class QueuedCall(Protocol):
    """`run` never raises; it keeps errors for the thread that waits."""

    @property
    def is_over(self) -> bool: ...

    def run(self) -> None: ...


class CallQueue:
    """Starts its thread with the first call. The thread ends with `close()`, or with the process."""

    def __init__(
        self,
        name: str,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._name = name
        self._around = around
        self._calls: queue.SimpleQueue[QueuedCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._guard = threading.RLock()
        self._is_changing = False
        # The newest call; None if the queue is known to be empty. Callers that are about to run
        # synchronously read it without the guard.
        self.newest: QueuedCall | None = None

    def is_empty(self) -> bool:
        newest = self.newest
        return newest is None or newest.is_over

    def submit(self, call: QueuedCall) -> None:
        if threading.current_thread() is self._thread:
            # A callback of a finished call makes another call, and may wait for it on this thread.
            call.run()
            return
        with self._change():
            if self._thread is None:
                # A daemon, so that a rank that leaves without closing its groups can exit at all.
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                start_thread(thread)
                self._thread = thread
            self.newest = call
            self._calls.put(call)

    def close(self) -> None:
        """Run the queued calls, then end the thread. Each call has a deadline, so this ends, too."""
        with self._change():
            thread, self._thread = self._thread, None
            if thread is not None:
                self._calls.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        with self._guard:
            if self._is_changing:  # by this thread, since it holds the guard
                raise CollectiveError(
                    "A call was made while this thread was making another one.",
                    where=f"the calls of {self._name!r}",
                    likely="a signal handler that interrupted it makes a collective itself",
                    hint="let the handler set a flag, and act on the flag after the step",
                )
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False

    def _serve(self) -> None:
        with self._around():
            while (call := self._calls.get()) is not None:
                call.run()
                # Release the last call and its arrays before the next call comes. If the guard is taken, its
                # holder is about to replace the call, or was interrupted by a signal handler that waits for
                # this thread.
                if self._guard.acquire(blocking=False):
                    if self.newest is call:
                        self.newest = None
                    self._guard.release()
                del call
