"""A step that outlives the ranks that make it: in blocks, each of which can be begun again, by any rank.

The one idea: a block is small, so a copy of its old values is cheap. Before a rank writes one, it copies what
the block's parameters and state are; so whoever finds it half written puts the copy back, and goes on from
there. Parameters, state and copies lie in memory of all ranks, and what is done is noted in the ledger.

This file is where everything lies. Imports its neighbours, reducer, arguments, errors and the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline import _core
from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.sharding.cuts import CUT_ELEMENTS, Piece
from paceline.sharding.shared_step import OWNER

BLOCK_BYTES = 1 << 20
"""Parameters of one block. With what an optimizer remembers of them, and the copies, they stay in the caches
of a core; and an optimizer of Python needs less time for its calls than for the elements."""


class Slot(NamedTuple):
    """One tensor that an optimizer remembers of a parameter.

    Attributes:
        key: Its name.
        dtype: The framework's.
        itemsize: Bytes of an element.
        shape: None: that of the piece.
    """

    key: Any
    dtype: Any
    itemsize: int
    shape: tuple[int, ...] | None


def no_journal(got: str) -> ConfigError:
    """The error where a journal cannot be kept.

    Args:
        got: Why.
    """
    return Arguments(OWNER).refuse(
        "journal",
        True,
        "parameters that the ranks of one host share, and an optimizer that updates every element by itself",
        "leave journal out: when a rank is lost, an error says whether the step is whole",
        got=got,
    )


def split(pieces: Sequence[Piece], itemsizes: Sequence[int], block_bytes: int | None = None) -> list[Piece]:
    """The same pieces, none of them larger than a block.

    Args:
        pieces: Runs of elements that are updated one by one.
        itemsizes: Bytes of an element of each parameter.

    Example:
        With blocks of 1 MiB, a piece of 300,000 elements of 4 bytes becomes one of 262,144 and one of 37,856.
    """
    parts: list[Piece] = []
    block_bytes = block_bytes or BLOCK_BYTES
    for piece in pieces:
        most = max(block_bytes // itemsizes[piece.parameter] // CUT_ELEMENTS, 2) * CUT_ELEMENTS
        begin = piece.begin
        while piece.end - begin > most:
            # The rest must not be shorter than what loops over vectors need.
            end = begin + most if piece.end - begin - most >= CUT_ELEMENTS else begin + most - CUT_ELEMENTS
            parts.append(replace(piece, begin=begin, end=end, is_whole=False))
            begin = end
        parts.append(replace(piece, begin=begin, is_whole=piece.is_whole and begin == piece.begin))
    return parts


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the journal's memory, in bytes from its beginning. Pure.

    Attributes:
        blocks: The numbers of the pieces of each block, for each rank.
        has_state: One byte for each piece, 1 if its state is here.
        is_ready: One byte for each rank, 1 if all its state is here.
        state: Where each slot is, for each piece.
        kept: Where the copy of a block is, for each rank.
        nbytes: All of it.
    """

    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    has_state: tuple[int, ...]
    is_ready: tuple[int, ...]
    state: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]
    nbytes: int


def lay_out_journal(
    pieces: Sequence[Piece],
    itemsizes: Sequence[int],
    slots: Sequence[Sequence[Slot]],
    world_size: int,
    block_bytes: int | None = None,
) -> Layout:
    """The layout for these pieces; the same on every rank.

    Args:
        pieces: All, none larger than a block.
        itemsizes: Bytes of an element of each parameter.
        slots: What the optimizer remembers of each piece.
        world_size: Number of ranks.
    """
    block_bytes = block_bytes or BLOCK_BYTES
    end = len(pieces)
    has_state = tuple(range(end))
    is_ready = tuple(range(end, end + world_size))
    end += world_size
    state = []
    for piece, its in zip(pieces, slots, strict=True):
        places = []
        for slot in its:
            end = aligned(end)
            places.append(end)
            end += slot_bytes(slot, piece)
        state.append(tuple(places))
    blocks: list[list[list[int]]] = [[] for _ in range(world_size)]
    filled = [0] * world_size
    for number, piece in enumerate(pieces):
        nbytes = _nbytes(piece, itemsizes)
        if not blocks[piece.rank] or filled[piece.rank] + nbytes > block_bytes:
            blocks[piece.rank].append([])
            filled[piece.rank] = 0
        blocks[piece.rank][-1].append(number)
        filled[piece.rank] += nbytes
    kept = []
    for own in blocks:
        end = aligned(end)
        kept.append(end)
        sizes = [
            [
                1,
                _nbytes(pieces[number], itemsizes),
                *(slot_bytes(slot, pieces[number]) for slot in slots[number]),
            ]
            for block in own
            for number in block
        ]
        rooms = iter([sum(map(aligned, each)) for each in sizes])
        end += max((sum(next(rooms) for _ in block) for block in own), default=0)
    return Layout(
        tuple(tuple(tuple(block) for block in own) for own in blocks),
        has_state,
        is_ready,
        tuple(state),
        tuple(kept),
        aligned(end),
    )


def slot_bytes(slot: Slot, piece: Piece) -> int:
    """Bytes of one tensor that is remembered of a piece."""
    count = piece.end - piece.begin
    if slot.shape is not None:
        count = 1
        for size in slot.shape:
            count *= size
    return count * slot.itemsize


def _nbytes(piece: Piece, itemsizes: Sequence[int]) -> int:
    return (piece.end - piece.begin) * itemsizes[piece.parameter]


def aligned(at: int) -> int:
    """The next cache line."""
    return -(-at // _core.ALIGNMENT_BYTES) * _core.ALIGNMENT_BYTES
