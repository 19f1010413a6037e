"""The `torch.distributed.Work` objects that calls on the torch process group return.

A synchronous call is over when it returns; all of them return the same FinishedWork. An asynchronous
collective is a CallWork in its group's CallQueue. The classes for messages between two ranks are in
`send_recv.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from paceline.collectives.latch import Latch

_NO_TIMEOUT = timedelta(0)


class FinishedWork(Work):
    """Has no state, so one object serves all calls."""

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
    """A collective that a CallQueue runs."""

    def __init__(self, call: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._call: Callable[[], None] | None = call
        self._tensors = tensors
        self.deliver: Callable[[], list[Any]] | None = None
        self._error: BaseException | None = None
        self._over = Latch()
        # The future that `_deliver` completes, and the one derived from it that users get. If two threads
        # append at the same time, the first entry counts. There is no lock: a signal handler could interrupt
        # its holder and then wait for the queue's thread.
        self._futures: list[tuple[torch.futures.Future[Any], torch.futures.Future[Any]]] = []
        self._undelivered = [None]  # the thread that pops the item delivers the result

    @property
    def is_over(self) -> bool:
        return self._over.is_open

    def run(self) -> None:
        """The queue's thread calls it once."""
        call, self._call = self._call, None
        assert call is not None
        try:
            call()
        except BaseException as error:
            self._error = error
        self._over.open()
        self._deliver()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds()
        if not self._over.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"Work.wait: not done after {seconds:.1f} s; the call goes on.")
        if self._error is not None:
            raise self._error
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
        if not self._futures:
            source: torch.futures.Future[Any] = torch.futures.Future()
            # With set_exception(), C++ waiters (torch's own DDP) would get the exception as a value. An
            # exception that a callback raises is an error for them, too.
            self._futures.append((source, source.then(self._value)))
        if self.is_over:
            self._deliver()
        return self._futures[0][1]

    def _deliver(self) -> None:
        if not self._futures:
            return  # get_future() checks whether the call is over after it has appended a future
        try:
            self._undelivered.pop()
        except IndexError:
            return
        self._futures[0][0].set_result(None)

    def _value(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._tensors if self.deliver is None else self.deliver()
