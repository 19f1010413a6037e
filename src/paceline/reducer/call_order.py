"""The order of the calls that several models make over one process group.

A process group pairs the calls of different ranks by their order; what it pairs wrongly it adds up, or ends
the process. So the backward passes of all models over one group take turns, in the order in which they began:
a backward makes its first call when all before it have made their last.
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
    """In which order this rank makes the calls of all models that one process group averages.

    So each rank reports at the end of a backward what it has called since the last one.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, int]] = []  # since the last backward
        self._known: tuple[list[tuple[int, int]], int] = [], 0  # those of the last backward, and their number
        # Held, as long as a backward is under way: one that was interrupted is given up at the same place on
        # all ranks, and not where somebody has collected the garbage.
        self._under_way: list[Caller] = []

    def begin(self, caller: Caller) -> None:
        """Gives up what exceptions interrupted before it, which is collective."""
        self.give_up_before(caller)
        if caller not in self._under_way:
            self._under_way.append(caller)

    def give_up_before(self, caller: Caller) -> None:
        """Gives up what exceptions interrupted before it, which is collective."""
        for each in list(self._under_way):
            if each is caller:
                return
            if each.is_interrupted:
                each.give_up_for_others()

    def end(self, caller: Caller) -> None:
        if caller in self._under_way:
            self._under_way.remove(caller)

    def is_turn_of(self, reducer: Any) -> bool:
        """Whether no other backward has begun before that of this reducer, and is under way."""
        return not self._under_way or self._under_way[0].reducer is reducer

    def note(self, reducer: int, bucket: int) -> None:
        self._calls.append((reducer, bucket))

    def take(self, reducer: int) -> int:
        """A number that ranks have in common if their calls were the same, up to this reducer's status."""
        calls, self._calls = self._calls, []
        calls.append((reducer, 0))
        if calls != self._known[0]:  # as they nearly always are
            self._known = calls, zlib.crc32(b"".join(_CALL.pack(*call) for call in calls))
        return self._known[1]


_call_orders: weakref.WeakKeyDictionary[Any, CallOrder] = weakref.WeakKeyDictionary()


def call_order_of(group: Any) -> CallOrder:
    """One for each process group of a framework; None is a group of one reducer's own."""
    return CallOrder() if group is None else _call_orders.setdefault(group, CallOrder())
