"""What a call on the torch process group returns: `torch.distributed.Work` objects.

May import torch and the standard library. A synchronous call is over when it returns and shares one
FinishedWork; an asynchronous collective is a CallWork in its group's CallQueue. Messages between two ranks
have their own, in `transfer.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

_NO_TIMEOUT = timedelta(0)


class FinishedWork(Work):
    """A call that was over when it returned. Holds nothing, so that one object serves all calls."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return []

    def synchronize(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


FINISHED = FinishedWork()


class CallWork(Work):
    """A collective that a CallQueue runs.

    Args:
        call: Blocks until the collective is done.
        tensors: What `result()` and the future deliver; kept alive until then.

    Attributes:
        deliver: Makes what the future delivers, where that is something else than `tensors`.
    """

    _futures_guard = threading.Lock()

    def __init__(self, call: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._call: Callable[[], None] | None = call
        self._tensors = tensors
        self.deliver: Callable[[], list[Any]] | None = None
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self.is_over = False
        self._over = threading.Lock()  # held until the call is over; lighter than an Event
        self._over.acquire()

    def run(self) -> None:
        """Make the call; what it raises is kept for whoever waits. Once, by the queue's thread."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        except BaseException as error:
            self._error = error
        with self._futures_guard:
            self.is_over = True
            future = self._future
        self._over.release()
        if future is not None:
            self._deliver(future)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds()
        if not self.is_over and not self.until_over(seconds if seconds > 0 else -1):
            raise RuntimeError(f"Work.wait: not done after {seconds:.1f} s; the call goes on.")
        if self._error is not None:
            raise self._error
        return True

    def until_over(self, timeout_s: float = -1) -> bool:
        """Block until the call is over, well or not; False when it still is not after `timeout_s`."""
        if not self._over.acquire(timeout=timeout_s):
            return False
        self._over.release()
        return True

    def is_completed(self) -> bool:
        return self.is_over

    def is_success(self) -> bool:
        return self.is_over and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of result tensors; an error of the call is an error of the future."""
        with self._futures_guard:
            if self._future is not None:
                return self._checked
            source: torch.futures.Future[Any] = torch.futures.Future()
            # set_exception() would hand C++ waiters (torch's own DDP) the exception as a value. What a
            # callback raises is an error to them too.
            self._checked: torch.futures.Future[Any] = source.then(self._value)
            self._future = source
            is_over = self.is_over
        if is_over:
            self._deliver(source)
        return self._checked

    def _deliver(self, future: torch.futures.Future[Any]) -> None:
        future.set_result(None)

    def _value(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._tensors if self.deliver is None else self.deliver()
