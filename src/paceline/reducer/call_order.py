"""The order of the calls that several models make over one process group.

A process group pairs the calls of different ranks by their order. It adds up wrongly paired calls, or ends
the process. So the backward passes of all models over one group take turns, in the order in which they began:
a backward makes its first call after all earlier ones have made their last.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from typing import Any, Protocol

_CALL = struct.Struct("<II")


class Caller(Protocol):
    @property
    def reducer(self) -> Any: ...

    @property
    def is_interrupted(self) -> bool: ...

    def give_up_for_others(self) -> None:
        """End the interrupted backward. Collective."""
        ...


class CallOrder:
    """The order in which this rank makes the calls of all models that one process group averages.

    At the end of a backward, each rank reports a hash of its calls since the last backward.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, int]] = []  # since the last backward
        self._known: tuple[list[tuple[int, int]], int] = [], 0  # those of the last backward, and their hash
        # Strong references while a backward is under way: an interrupted one must be given up at the same
        # place on all ranks, and not when garbage collection happens to run.
        self._under_way: list[Caller] = []

    def begin(self, caller: Caller) -> None:
        """Begin a backward. First gives up earlier ones that exceptions interrupted, which is collective."""
        self.give_up_before(caller)
        if caller not in self._under_way:
            self._under_way.append(caller)

    def give_up_before(self, caller: Caller) -> None:
        """Give up the backward passes before this one that exceptions interrupted, which is collective."""
        for each in list(self._under_way):
            if each is caller:
                return
            if each.is_interrupted:
                each.give_up_for_others()

    def end(self, caller: Caller) -> None:
        if caller in self._under_way:
            self._under_way.remove(caller)

    def is_turn_of(self, reducer: Any) -> bool:
        """Whether no backward that began before that of this reducer is under way."""
        return not self._under_way or self._under_way[0].reducer is reducer

    def note(self, reducer: int, bucket: int) -> None:
        self._calls.append((reducer, bucket))

    def take(self, reducer: int) -> int:
        """A hash of this rank's calls up to this reducer's status, equal on ranks with the same calls."""
        calls, self._calls = self._calls, []
        calls.append((reducer, 0))
        if calls != self._known[0]:  # nearly always they are the same, and the hash is reused
            self._known = calls, zlib.crc32(b"".join(_CALL.pack(*call) for call in calls))
        return self._known[1]


_call_orders: weakref.WeakKeyDictionary[Any, CallOrder] = weakref.WeakKeyDictionary()


def call_order_of(group: Any) -> CallOrder:
    """The call order of a framework's process group; None: a new one, for a single reducer."""
    return CallOrder() if group is None else _call_orders.setdefault(group, CallOrder())
