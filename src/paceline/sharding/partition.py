"""Assigns elements to ranks: parameters are cut into pieces, and each piece is updated by one rank.

A cut costs nothing but its two ends. So parameters are laid end to end and cut where each rank's bytes end:
all ranks get equally many bytes, and at each cut at most one parameter is split.

Words: a *piece* is a range of elements of one parameter, in memory order, that one rank updates. It is
*whole* if it is all of its parameter. Parameters that must not be cut are assigned whole, balanced by size. A
rank may have several consecutive pieces of one parameter, each of which fits into a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

CUT_ELEMENTS = 128
"""Cuts lie at multiples of this many elements, and at least this far from both ends of a parameter.

Loops over tensors process several vectors at a time and the remaining elements one by one, and some of them
round the two differently: torch's SGD with 16 bits and its fused optimizers do, measured with cuts at 1, 2,
8 and 13 elements. With cuts at multiples of the largest such group (64 elements of 16 bits), each element is
rounded as in the uncut tensor. Two ranks that write to one array also write to different cache line pairs.
"""

CACHED_BYTES = 768 << 10
"""How many bytes of a parameter a core can update within its caches, with gradient and state.

An optimizer of plain tensor operations reads a whole tensor about a dozen times per step. AdamW uses five
arrays at a time: 3.75 MiB, less than the cache that one core of today's servers has for itself. Of sizes
from 32 Ki to 25 Mi elements of 4 bytes, 192 Ki took the least time; smaller pieces cost more calls.
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
    """Cut all parameters, in their order, so that each rank gets equally many bytes.

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
    """Assign whole parameters, the largest first, each to the rank that has the fewest bytes.

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
    """Assign all parameters of an optimizer to the ranks: cut where that is allowed, else whole.

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
    """Split pieces that are larger than `cached_bytes` into pieces of about that size, for the same ranks."""
    fitting: list[Piece] = []
    for piece in pieces:
        extent, count = extents[piece.parameter], 1
        if is_cut[piece.parameter] and extent.may_be_cut:
            count = round((piece.end - piece.begin) * extent.itemsize / cached_bytes)
        fitting += _in_even_parts(piece, count)
    return fitting


def split_into_blocks(pieces: Sequence[Piece], itemsizes: Sequence[int], block_bytes: int) -> list[Piece]:
    """Split pieces that are larger than a block into smaller ones, for the same ranks."""
    parts: list[Piece] = []
    for piece in pieces:
        most = max(block_bytes // itemsizes[piece.parameter] // CUT_ELEMENTS, 2)
        groups, rest = divmod(piece.end - piece.begin, CUT_ELEMENTS)
        is_larger = groups + (rest > 0) > most
        parts += _in_even_parts(piece, -(-groups // (most - (rest > 0))) if is_larger else 1)
    return parts


def _in_even_parts(piece: Piece, count: int) -> list[Piece]:
    """The last part also gets the remaining elements."""
    groups = (piece.end - piece.begin) // CUT_ELEMENTS
    count = min(groups, count)
    if count <= 1:
        return [piece]
    begins = [piece.begin + groups * number // count * CUT_ELEMENTS for number in range(count)]
    ends = [*begins[1:], piece.end]
    return [replace(piece, begin=b, end=e, is_whole=False) for b, e in zip(begins, ends, strict=True)]
