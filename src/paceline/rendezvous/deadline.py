"""A point in time until which one may wait. Imports only the standard library."""

from __future__ import annotations

import time


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
        """Seconds until then; 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())

    def is_over(self) -> bool:
        return self.left_s() == 0.0
