"""Who updates what: parameters, cut into pieces that are dealt to the ranks.

A cut costs nothing but its two ends. So parameters are laid end to end and cut where the bytes
of each rank end: every rank gets as much as any other, and only one parameter in each cut is shared at all.

Words: a *piece* is a run of elements of one parameter, in the order of its memory, which one rank updates. It
is *whole* if it is all of its parameter. Parameters that must not be cut are dealt whole, balanced by size.
What a rank was dealt of a parameter may be several pieces, one after the other, each of which fits a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

CUT_ELEMENTS = 128
"""Cuts lie at multiples of so many elements, and so far from both ends of a parameter.

Loops over tensors work on vectors, several at a time, and on what is left over one element after the other,
where some round differently: torch's SGD with 16 bits and its fused optimizers do, measured with cuts at 1,
2, 8 and 13 elements. A rank that begins at a multiple of the largest such group (64 elements of 16 bits)
leaves the others as they are. And two ranks that write to one array write to different pairs of cache lines.
"""

CACHED_BYTES = 768 << 10
"""How many bytes of a parameter a core can update within its caches, with gradient and state.

An optimizer of plain tensor operations goes through all of a tensor a dozen times for one step. AdamW has
five arrays in use at a time: 3.75 MiB, less than a core's part of the caches of today's servers. With 192 Ki
elements of 4 bytes it took the least time of 32 Ki to 25 Mi; smaller pieces cost more calls.
"""


@dataclass(frozen=True)
class Extent:
    """The size of one parameter."""

    numel: int
    itemsize: int
    may_be_cut: bool = True

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Piece:
    parameter: int
    begin: int
    end: int
    is_whole: bool
    rank: int


def cut_evenly(extents: Sequence[Extent], world_size: int) -> list[Piece]:
    """Pieces of all parameters, in their order, with equally many bytes for each rank.

    Example:
        Two parameters of 1000 and 256 elements of 4 bytes, on two ranks: rank 0 gets elements 0 to 639 of the
        first, and rank 1 the rest of it and all of the second.
    """
    total = sum(extent.nbytes for extent in extents)
    pieces: list[Piece] = []
    rank, behind = 0, 0  # bytes of the parameters before this one
    for index, extent in enumerate(extents):
        begin = 0
        while rank < world_size - 1 and behind + extent.nbytes > (limit := total * (rank + 1) // world_size):
            end = _cut_at(extent, (limit - behind) / extent.itemsize)
            if end > begin:
                pieces.append(Piece(index, begin, end, end - begin == extent.numel, rank))
            begin = max(begin, end)
            if begin == extent.numel:
                break
            rank += 1
        if begin < extent.numel or not extent.numel:
            pieces.append(Piece(index, begin, extent.numel, begin == 0, rank))
        behind += extent.nbytes
    return pieces


def _cut_at(extent: Extent, element: float) -> int:
    if not extent.may_be_cut or extent.numel < 2 * CUT_ELEMENTS:
        return extent.numel if 2 * element >= extent.numel else 0
    end = round(element / CUT_ELEMENTS) * CUT_ELEMENTS
    if end < CUT_ELEMENTS:
        return 0
    return end if extent.numel - end >= CUT_ELEMENTS else extent.numel


def deal_whole(extents: Sequence[Extent], loads: list[int]) -> list[Piece]:
    """All parameters, each whole, the largest first to the rank that has the fewest bytes.

    Source: longest processing time first, Graham, SIAM J. Appl. Math. 17(2), 1969.
    """
    pieces: list[Piece] = []
    for place in sorted(range(len(extents)), key=lambda place: -extents[place].nbytes):
        rank = min(range(len(loads)), key=loads.__getitem__)
        loads[rank] += extents[place].nbytes
        pieces.append(Piece(place, 0, extents[place].numel, True, rank))
    return sorted(pieces, key=lambda piece: piece.parameter)


def deal(
    extents: Sequence[Extent], is_frozen: Sequence[bool], is_cut: Sequence[bool], loads: list[int]
) -> list[Piece]:
    """Pieces of all parameters of an optimizer: of those that it may cut, and of whole ones.

    Example:
        Four equal parameters of which the last two are frozen, on two ranks: each rank gets one of the first
        two, and one of the last two.
    """
    pieces: list[Piece] = []
    for frozen in (False, True):
        for cut in (False, True):
            chosen = [
                index
                for index, kind in enumerate(zip(is_frozen, is_cut, strict=True))
                if kind == (frozen, cut)
            ]
            some = [extents[index] for index in chosen]
            dealt = cut_evenly(some, len(loads)) if cut else deal_whole(some, loads)
            pieces += [replace(piece, parameter=chosen[piece.parameter]) for piece in dealt]
    return pieces


def fit_into_caches(
    pieces: Sequence[Piece], extents: Sequence[Extent], is_cut: Sequence[bool], cached_bytes: int
) -> list[Piece]:
    """The same elements for each rank, in pieces of about `cached_bytes` where they are larger."""
    fitting: list[Piece] = []
    for piece in pieces:
        extent, count = extents[piece.parameter], 1
        if is_cut[piece.parameter] and extent.may_be_cut:
            count = round((piece.end - piece.begin) * extent.itemsize / cached_bytes)
        fitting += _in_even_parts(piece, count)
    return fitting


def split_into_blocks(pieces: Sequence[Piece], itemsizes: Sequence[int], block_bytes: int) -> list[Piece]:
    """The same elements for each rank, in pieces none of which is larger than a block."""
    parts: list[Piece] = []
    for piece in pieces:
        most = max(block_bytes // itemsizes[piece.parameter] // CUT_ELEMENTS, 2)
        groups, rest = divmod(piece.end - piece.begin, CUT_ELEMENTS)
        is_larger = groups + (rest > 0) > most
        parts += _in_even_parts(piece, -(-groups // (most - (rest > 0))) if is_larger else 1)
    return parts


def _in_even_parts(piece: Piece, count: int) -> list[Piece]:
    """The last one has what is left over."""
    groups = (piece.end - piece.begin) // CUT_ELEMENTS
    count = min(groups, count)
    if count <= 1:
        return [piece]
    begins = [piece.begin + groups * number // count * CUT_ELEMENTS for number in range(count)]
    ends = [*begins[1:], piece.end]
    return [replace(piece, begin=b, end=e, is_whole=False) for b, e in zip(begins, ends, strict=True)]
