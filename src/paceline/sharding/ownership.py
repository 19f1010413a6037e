"""Who updates which part of each parameter, told to the backward passes that scatter gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.reducer.owners import Owned, OwnedRange, owners
from paceline.sharding.cuts import Piece


def tell_owners(
    parameters: Sequence[Any], itemsizes: Sequence[int], pieces: Sequence[Piece], rank: int, world_size: int
) -> None:
    """Tell wrapped models which rank needs which part of each gradient. Collective.

    Args:
        parameters: All that an optimizer updates.
        itemsizes: Bytes of an element of each.
        pieces: Who updates what of them, in the order of their elements.
        rank: This rank.
        world_size: Number of ranks.
    """
    ranges: list[list[OwnedRange]] = [[] for _ in parameters]
    for piece in pieces:
        if piece.end == piece.begin:
            continue
        itemsize = itemsizes[piece.parameter]
        known, begin = ranges[piece.parameter], piece.begin * itemsize
        if known and (known[-1].end, known[-1].rank) == (begin, piece.rank):
            begin = known.pop().begin
        known.append(OwnedRange(begin, piece.end * itemsize, piece.rank))
    owners.tell(
        (parameter, Owned(tuple(its), rank, world_size)) for parameter, its in zip(parameters, ranges)
    )
