"""Deadlines, also for calls that take no time-out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Deadline:
    """`timeout_s` seconds from now.

    Example:
        >>> Deadline(10.0).left_s() <= 10.0
        True
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        return self.left_s() == 0.0


def call_within(seconds: float, function: Callable[[], object]) -> None:
    """Call `function`, which may block forever, in a thread, and wait for its end for `seconds`.

    Raises:
        TimeoutError: It has not ended in time. The thread goes on, and its result is dropped.
        BaseException: The exception that `function` raised.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline-within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    if errors:
        raise errors[0]
