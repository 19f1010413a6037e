"""The call that a framework makes at the end of a backward, or that never comes, because the backward raised.

The one idea: the framework alone holds the call, together with what else it knows of that backward. An
exception drops it all, and that it goes unmade is how anybody learns that the backward is over.
"""

from __future__ import annotations

from collections.abc import Callable


class EndOfBackward:
    """To be given to the framework, and not kept.

    Args:
        end: Called when the backward is over.
        interrupted: Called instead when an exception has ended it, before the user has the exception, and
            within the framework: it must neither wait nor raise.
    """

    __slots__ = ("_end", "_interrupted", "_is_made")

    def __init__(self, end: Callable[[], None], interrupted: Callable[[], None]) -> None:
        self._end = end
        self._interrupted = interrupted
        self._is_made = False

    def __call__(self) -> None:
        self._is_made = True
        self._end()

    def __del__(self) -> None:
        if not self._is_made:
            self._interrupted()
