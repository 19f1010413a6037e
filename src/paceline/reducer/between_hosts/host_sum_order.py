"""The blocks of ranks whose sums go from host to host, and the order in which these sums are added.

A block is a node of the binary tree over all ranks, or a whole host. With nodes of the tree the sums have the
bits of one host with all ranks; with whole hosts the fewest bytes are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.reducer.sum_order import add_in_order, join_in_order


@dataclass(frozen=True)
class Block:
    """Consecutive ranks of a host whose sum goes to the other hosts."""

    host: int
    local_ranks: tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """All blocks, and how their sums are added.

    Attributes:
        blocks: In the order of their lowest ranks.
        steps: Pairs to add, one after the other, by number: block i has number i, and the result of step j
            has the number len(blocks) + j. Empty: add all at once, as `add_in_order` does.
    """

    blocks: tuple[Block, ...]
    steps: tuple[tuple[int, int], ...] = ()

    def add(self, numbers: Sequence[float]) -> float:
        if not self.steps:
            return add_in_order(numbers)
        found = list(numbers)
        for left, right in self.steps:
            found.append(found[left] + found[right])
        return found[-1]


def whole_hosts(ranks: Sequence[Sequence[int]], most_at_once: int) -> Blocks:
    """Each host as one block, so that the fewest bytes are sent.

    Example:
        >>> whole_hosts([[0], [1], [2]], 128).steps, whole_hosts([[0], [1], [2]], 2).steps
        ((), ((0, 1), (3, 2)))
    """
    leaves: list[_Tree] = [Block(host, (0, len(each))) for host, each in enumerate(ranks)]
    return _in_steps(join_in_order(leaves, _Pair), most_at_once)


def exact_blocks(ranks: Sequence[Sequence[int]], most_at_once: int) -> Blocks:
    """The largest nodes of the tree over all ranks that lie on one host each, and the rest of this tree.

    So their sum has the bits of one host with all the ranks.

    Example:
        >>> exact_blocks([[0, 1], [2, 3]], 128) == whole_hosts([[0, 1], [2, 3]], 128)
        True
        >>> found = exact_blocks([[0, 1, 2], [3, 4, 5]], 128)  # ((0 + 1) + (2 + 3)) + (4 + 5)
        >>> [(block.host, block.local_ranks) for block in found.blocks], found.steps
        ([(0, (0, 2)), (0, (2, 3)), (1, (0, 1)), (1, (1, 3))], ((1, 2), (0, 4), (5, 3)))
    """
    leaves = {
        rank: Block(host, (local_rank, local_rank + 1))
        for host, each in enumerate(ranks)
        for local_rank, rank in enumerate(each)
    }
    every: list[_Tree] = [leaves[rank] for rank in sorted(leaves)]
    return _in_steps(join_in_order(every, _join_on_one_host), most_at_once)


def _in_steps(tree: _Tree, most_at_once: int) -> Blocks:
    blocks: list[Block] = []
    pairs: list[_Pair] = []
    _flatten(tree, blocks, pairs)
    nodes: list[_Tree] = [*blocks, *pairs]
    if tree == join_in_order(nodes[: len(blocks)], _Pair) and len(blocks) <= most_at_once:
        return Blocks(tuple(blocks))
    numbers = {node: number for number, node in enumerate(nodes)}
    return Blocks(tuple(blocks), tuple((numbers[pair.left], numbers[pair.right]) for pair in pairs))


@dataclass(frozen=True)
class _Pair:
    left: _Tree
    right: _Tree


_Tree: TypeAlias = "Block | _Pair"


def _join_on_one_host(left: _Tree, right: _Tree) -> _Tree:
    if isinstance(left, Block) and isinstance(right, Block) and left.host == right.host:
        return Block(left.host, (left.local_ranks[0], right.local_ranks[1]))
    return _Pair(left, right)


def _flatten(tree: _Tree, blocks: list[Block], pairs: list[_Pair]) -> None:
    if isinstance(tree, Block):
        blocks.append(tree)
        return
    _flatten(tree.left, blocks, pairs)
    _flatten(tree.right, blocks, pairs)
    pairs.append(tree)


def has_bits_of_one_host(ranks: Sequence[Sequence[int]]) -> bool:
    """Whether sums within each host, and then over the hosts, have the bits of one host with all the ranks.

    Example:
        >>> has_bits_of_one_host([[0, 1], [2, 3]]), has_bits_of_one_host([[0, 2], [1, 3]])
        (True, False)
        >>> has_bits_of_one_host([[0, 1], [2]]), has_bits_of_one_host([[0], [1, 2]])
        (True, False)
    """

    def tree(leaves: Sequence[object]) -> object:
        return join_in_order(leaves, lambda left, right: (left, right))

    return tree([tree(host) for host in ranks]) == tree(range(sum(map(len, ranks))))
