"""The order in which sums over ranks are formed: a binary tree over rank order, the same everywhere. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

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
