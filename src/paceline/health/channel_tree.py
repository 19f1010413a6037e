r"""Which ranks of a control channel are connected with which: a star, or for many ranks a tree of two levels.

    star                       tree
        0                          0              the hub
      / | \                      / | \
     1  2  3                    1  4  8           the first rank of each other host, and the hub's own
                                  /|\  |\         the other ranks of a host
                                 5 6 7 9 10

The tree gives the hub one connection for each host instead of one for each rank. Within a host the extra hop
is short, and no network link can be cut. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HUB = 0
MOST_IN_A_STAR = 64
"""Ranks. Up to this number a star is simplest: reports pass through no third rank except the hub."""


@dataclass(frozen=True)
class Neighbours:
    """The ranks that a rank is connected with.

    Attributes:
        parent: The rank that it connects to; None for the hub.
        below: For each rank that connects to this one, that rank and all ranks that reach the hub through it.
    """

    parent: int | None
    below: Mapping[int, frozenset[int]]


def neighbours_of(rank: int, hosts: Sequence[Sequence[int]]) -> Neighbours:
    """The neighbours of a rank. Computes the same tree on all ranks.

    Example:
        >>> neighbours_of(2, [[0, 1], [2, 3]])
        Neighbours(parent=0, below={})
    """
    all_ranks = [each for ranks in hosts for each in ranks]
    if len(all_ranks) <= MOST_IN_A_STAR:
        below = {each: frozenset({each}) for each in all_ranks if each != HUB}
        return Neighbours(None, below) if rank == HUB else Neighbours(HUB, {})
    own = next(ranks for ranks in hosts if rank in ranks)
    if rank != own[0]:
        return Neighbours(own[0], {})
    below = {each: frozenset({each}) for each in own[1:]}
    if rank != HUB:
        return Neighbours(HUB, below)
    return Neighbours(None, below | {ranks[0]: frozenset(ranks) for ranks in hosts if ranks[0] != HUB})
