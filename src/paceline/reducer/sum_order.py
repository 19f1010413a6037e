"""The order of sums over ranks: a fixed binary tree over the ranks in order, the same everywhere. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from paceline.arguments import Arguments
from paceline.errors import ConfigError

_Item = TypeVar("_Item")


def add_in_order(numbers: Sequence[float]) -> float:
    """The sum in the order in which the core sums over ranks: neighbours first, an odd one carried up."""
    return join_in_order(numbers, operator.add)


def join_in_order(items: Sequence[_Item], join: Callable[[_Item, _Item], _Item]) -> _Item:
    """As `add_in_order`, with any operation on pairs; needs at least one item."""
    level = list(items)
    while len(level) > 1:
        pairs = [join(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def cut_tree(leaves: int, parts: int) -> list[range] | None:
    """Cut the tree over `leaves` items into `parts` whole subtrees that form the tree over `parts` items.

    So the sums of the subtrees, added in order, have the bits of the sum of all. There is at most one such
    cut. None: there is none.

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
    """The number of items left of the last addition: the largest power of two below the number of items."""
    return 1 << (items - 1).bit_length() - 1


class OrderedSum(Generic[_Item]):
    """As `join_in_order`, for items that come one by one; holds no more sums than the height of the tree."""

    def __init__(self, join: Callable[[_Item, _Item], _Item]) -> None:
        self._join = join
        self._sums: list[tuple[int, _Item]] = []  # each with the number of its items

    def add(self, item: _Item) -> None:
        count = 1
        while self._sums and self._sums[-1][0] == count:
            item = self._join(self._sums.pop()[1], item)
            count *= 2
        self._sums.append((count, item))

    def take(self) -> _Item:
        """The sum of all items since the last call; needs at least one."""
        _, total = self._sums.pop()
        while self._sums:
            total = self._join(self._sums.pop()[1], total)
        return total


def played_by(owner: str, virtual_ranks: int, rank: int, world_size: int) -> range:
    """The virtual ranks that a process runs, in this order.

    Each process has a whole subtree of the tree in which gradients are added. So it has a single sum, and the
    sum over the processes is the rest of that tree.

    Raises:
        ConfigError: There are too many processes, or the tree cannot be cut into this number of subtrees.
    """
    hint = "virtual_ranks=8 runs on 1 to 8 processes, and equally fast on each of 1, 2, 4, 8"
    virtual_ranks = Arguments(owner).whole("virtual_ranks", virtual_ranks, least=1, hint=hint)
    cut = cut_tree(virtual_ranks, world_size)
    if cut is None:
        fitting = [count for count in range(1, virtual_ranks + 1) if cut_tree(virtual_ranks, count)]
        raise ConfigError(
            f"{owner}: {virtual_ranks} virtual ranks can't be played by {world_size} processes.",
            where=f"rank {rank} of {world_size}",
            expected=f"one of these numbers of processes: {', '.join(map(str, fitting))}",
            hint="a power of two in virtual_ranks takes any number of processes up to itself",
        )
    return cut[rank]
