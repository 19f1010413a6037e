"""Gradients that share memory, outside of a backward. A pure function.

Two parameters behind views of one sum may get one memory for both gradients. In a backward the core finds
them (cpp/reducer/overlaps.h); here are those that no backward has seen.
"""

from __future__ import annotations

from collections.abc import Iterable


def overlapping(extents: Iterable[tuple[int, int, int]]) -> set[int]:
    """Which of these pieces of memory overlap with any other.

    Args:
        extents: Address, length in bytes, and index of each.

    Example:
        >>> overlapping([(100, 8, 0), (108, 8, 1), (112, 8, 2)])
        {1, 2}
    """
    found: set[int] = set()
    furthest, holder = 0, -1  # the end of the one that reaches furthest so far
    for begin, length, index in sorted(extents):
        if length and begin < furthest:
            found |= {index, holder}
        if begin + length > furthest:
            furthest, holder = begin + length, index
    return found
