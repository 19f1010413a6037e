"""The tree in which sums are formed, and its cuts into subtrees, compared with trees written as text."""

from __future__ import annotations

import functools
import itertools

import pytest

from paceline.errors import ConfigError
from paceline.reducer.sum_order import OrderedSum, cut_tree, join_in_order, played_by

Tree = tuple[object, object] | int


def tree_of(items: list[Tree]) -> Tree:
    """Level by level: neighbours first, an odd one carried up."""
    while len(items) > 1:
        pairs: list[Tree] = [tuple(items[at : at + 2]) for at in range(0, len(items) - 1, 2)]
        items = pairs + items[len(items) // 2 * 2 :]
    return items[0]


def leaves_of(tree: Tree) -> int:
    return 1 if isinstance(tree, int) else sum(map(leaves_of, tree))


@functools.cache
def loads(leaves: int, parts: int) -> frozenset[int]:
    """The largest subtree of each cut of the tree over `leaves` into `parts`, sides swapped or not."""

    def cuts(tree: Tree, over: Tree) -> set[int]:
        if isinstance(over, int):
            return {leaves_of(tree)}
        if isinstance(tree, int):
            return set()
        found: set[int] = set()
        for left, right in (tree, tree[::-1]):
            pairs = itertools.product(cuts(left, over[0]), cuts(right, over[1]))
            found.update(max(pair) for pair in pairs)
        return found

    return frozenset(cuts(tree_of(list(range(leaves))), tree_of(list(range(parts)))))


@pytest.mark.parametrize("leaves", range(1, 34))
def test_the_sum_over_the_parts_of_a_cut_is_the_sum_over_all(leaves: int) -> None:
    whole = tree_of(list(range(leaves)))
    assert join_in_order(range(leaves), lambda a, b: (a, b)) == whole
    for parts in range(1, leaves + 3):
        cut = cut_tree(leaves, parts)
        if cut is None:
            continue
        assert [leaf for part in cut for leaf in part] == list(range(leaves)) and all(cut)
        sums = []
        for part in cut:
            ordered = OrderedSum[Tree](lambda a, b: (a, b))
            for leaf in part:
                ordered.add(leaf)
            sums.append(ordered.take())
        assert tree_of(sums) == whole


@pytest.mark.parametrize("leaves", range(1, 18))
def test_a_cut_is_found_where_there_is_one_and_none_has_a_smaller_largest_part(leaves: int) -> None:
    for parts in range(1, leaves + 3):
        cut, possible = cut_tree(leaves, parts), loads(leaves, parts)
        assert (cut is None) == (not possible)
        if cut is not None:
            assert max(map(len, cut)) == min(possible)


def test_a_power_of_two_can_be_cut_into_any_number_of_parts() -> None:
    for leaves in (1, 2, 4, 8, 16, 32, 64):
        assert all(cut_tree(leaves, parts) for parts in range(1, leaves + 1))


def test_what_a_process_plays() -> None:
    assert [played_by("x", 8, rank, 3) for rank in range(3)] == [range(2), range(2, 4), range(4, 8)]
    with pytest.raises(ConfigError, match=r"8 virtual ranks can't be played by 9"):
        played_by("x", 8, 0, 9)
