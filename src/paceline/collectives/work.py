"""What an asynchronous call returns. Imports errors and the core.

The core knows addresses only; what is under way keeps its arrays alive here, even if the caller drops both
the array and the Work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline import _core
from paceline.errors import DeadlineError


class Work:
    """A collective that was started with `async_op=True`.

    Example:
        On both ranks: `work = group.all_reduce(gradients, async_op=True)`, other work meanwhile, then
        `work.wait()`; the array must not be touched in between.
    """

    def __init__(self, call: Callable[[], Any], arrays: object = None) -> None:
        self._call: Callable[[], Any] | None = call
        self._arrays = arrays
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = threading.Event()

    def run(self) -> None:
        """Make the call. By the queue's thread, once."""
        call, self._call = self._call, None
        assert call is not None
        try:
            self._result = call()
        except BaseException as error:  # belongs to whoever waits
            self._error = error
        self._arrays = None
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether the call is done, well or not. Does not block."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the call is done and return what the synchronous call would have.

        Args:
            timeout_s: None: until the group's own deadline ends the call.

        Raises:
            DeadlineError: Not done after `timeout_s`; the call goes on, and wait() may be called again.
            CollectiveError: What the call raised.
        """
        if not self._over.wait(timeout_s):
            raise DeadlineError(
                f"The call was not done after {timeout_s:.1f} s.",
                hint="it goes on: call wait() again, or give it longer",
            )
        if self._error is not None:
            raise self._error
        return self._result


class TransferWork:
    """A message that was started with `async_op=True`. It moves on in every call on the group."""

    def __init__(
        self, core: _core.HostGroup, transfer: int, array: object, orphans: list[TransferWork]
    ) -> None:
        self._core = core
        self._transfer: int | None = transfer
        self._array = array  # keeps the memory alive until the transfer is over
        self._orphans = orphans

    @property
    def is_over(self) -> bool:
        """Whether the message has left or arrived whole."""
        return self._transfer is None or self._core.test(self._transfer)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the message has left (send) or arrived (recv). Raises what went wrong with it."""
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            self._core.wait(transfer, -1.0 if timeout_s is None else timeout_s)

    def __del__(self) -> None:
        # Nobody will wait for it any more. If it is still under way, whoever holds `orphans` takes over.
        if self._transfer is not None and not self._core.forget(self._transfer):
            self._orphans[:] = [each for each in self._orphans if not each._forget()]
            self._orphans.append(self)

    def _forget(self) -> bool:
        if self._transfer is not None and self._core.forget(self._transfer):
            self._transfer = None
        return self._transfer is None
