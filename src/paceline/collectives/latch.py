"""A latch that is closed, and once opened stays open.

It is lighter than a threading.Event. A signal handler may interrupt a wait anywhere, because the interrupted
thread holds no lock that another wait, or the thread that opens the latch, would need.
"""

from __future__ import annotations

import threading


class Latch:
    def __init__(self) -> None:
        self.is_open = False
        self._closed = threading.Lock()  # held while the latch is closed, and briefly at the end of each wait
        self._closed.acquire()

    def open(self) -> None:
        self.is_open = True
        self._closed.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        if not self.is_open:
            if not self._closed.acquire(timeout=self._limit(timeout_s)):
                return self.is_open
            self._closed.release()
        return True

    @staticmethod
    def _limit(timeout_s: float | None) -> float:
        return -1.0 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
