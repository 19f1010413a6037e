"""The order in which sums over ranks are formed: a binary tree over rank order, the same everywhere. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


def add_in_order(numbers: Sequence[float]) -> float:
    """The sum, in the order in which the core sums over ranks: neighbours first, an odd one carried up."""
    return join_in_order(numbers, operator.add)


def join_in_order(items: Sequence[_Item], join: Callable[[_Item, _Item], _Item]) -> _Item:
    """What `add_in_order` does, with anything that can be joined in pairs; at least one item."""
    level = list(items)
    while len(level) > 1:
        pairs = [join(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def cut_tree(leaves: int, parts: int) -> list[range] | None:
    """Cut the tree over `leaves` items into whole subtrees, over which it is the tree over `parts` items.

    So the sums of the parts, added in order, have the bits of the sum of all. There is one such cut at most
    in this order. None: there is none.

    Example:
        >>> cut_tree(8, 3)  # ((0+1)+(2+3)) + (4+5+6+7)
        [range(0, 2), range(2, 4), range(4, 8)]
    """
    if parts == 1:
        return [range(leaves)]
    if parts > leaves:
        return None
    left = _left_of(leaves)
    first, second = cut_tree(left, _left_of(parts)), cut_tree(leaves - left, parts - _left_of(parts))
    if first is None or second is None:
        return None
    return first + [range(left + each.start, left + each.stop) for each in second]


def _left_of(items: int) -> int:
    """Items on the left of the last addition: the largest power of two below their number."""
    return 1 << (items - 1).bit_length() - 1


class OrderedSum(Generic[_Item]):
    """What `join_in_order` does, of items that come one by one; holds as few sums as the tree is high."""

    def __init__(self, join: Callable[[_Item, _Item], _Item]) -> None:
        self._join = join
        self._sums: list[tuple[int, _Item]] = []  # and of how many items

    def add(self, item: _Item) -> None:
        count = 1
        while self._sums and self._sums[-1][0] == count:
            item = self._join(self._sums.pop()[1], item)
            count *= 2
        self._sums.append((count, item))

    def take(self) -> _Item:
        """The sum of all since the last call; at least one."""
        _, total = self._sums.pop()
        while self._sums:
            total = self._join(self._sums.pop()[1], total)
        return total
