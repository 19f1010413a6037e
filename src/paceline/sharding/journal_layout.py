"""The memory layout of a journal, and the blocks in which a step is made. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline import _core
from paceline.sharding.partition import Piece, split_into_blocks

BLOCK_BYTES = 1 << 20
"""Bytes of parameters in one block. With the optimizer's state and the copies, a block fits into the caches
of one core, and an optimizer written in Python spends less time on its calls than on the elements."""


class Slot(NamedTuple):
    """One tensor of an optimizer's state for one parameter.

    Attributes:
        key: Its name.
        dtype: The framework's dtype.
        itemsize: Bytes of an element.
        shape: None: the shape of the piece.
    """

    key: Any
    dtype: Any
    itemsize: int
    shape: tuple[int, ...] | None


Blocks = tuple[tuple[tuple[int, ...], ...], ...]
"""The numbers of the pieces of each block, for each rank."""


def split(pieces: Sequence[Piece], itemsizes: Sequence[int]) -> list[Piece]:
    return split_into_blocks(pieces, itemsizes, BLOCK_BYTES)


def blocks_of(
    pieces: Sequence[Piece], itemsizes: Sequence[int], world_size: int, block_bytes: int | None = None
) -> Blocks:
    """Group the pieces of each rank into blocks that are written together, no two pieces of one parameter in
    a block.
    """
    block_bytes = block_bytes or BLOCK_BYTES
    blocks: list[list[list[int]]] = [[] for _ in range(world_size)]
    filled, last = [0] * world_size, [-1] * world_size
    for number, piece in enumerate(pieces):
        rank, nbytes = piece.rank, _nbytes(piece, itemsizes)
        # A front end may identify a piece by the name of its parameter only.
        if not blocks[rank] or filled[rank] + nbytes > block_bytes or last[rank] == piece.parameter:
            blocks[rank].append([])
            filled[rank] = 0
        blocks[rank][-1].append(number)
        filled[rank] += nbytes
        last[rank] = piece.parameter
    return tuple(tuple(tuple(block) for block in own) for own in blocks)


@dataclass(frozen=True)
class Layout:
    """Where everything lies in the journal's memory, as byte offsets from its beginning.

    Attributes:
        blocks: The numbers of the pieces of each block, for each rank.
        has_state: One byte for each piece: 0: it has no state, 1: its state is here, 2: it is elsewhere.
        is_ready: One byte for each rank, 1 if `has_state` is up to date for its pieces.
        state: Where each slot is, for each piece.
        kept: Where the copy of a block is, for each rank.
        nbytes: The size of all of it.
    """

    blocks: Blocks
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
    """The layout for these pieces; the same on every rank."""
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
    blocks = blocks_of(pieces, itemsizes, world_size, block_bytes)
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
        blocks,
        has_state,
        is_ready,
        tuple(state),
        tuple(kept),
        aligned(end),
    )


def slot_bytes(slot: Slot, piece: Piece) -> int:
    count = piece.end - piece.begin
    if slot.shape is not None:
        count = 1
        for size in slot.shape:
            count *= size
    return count * slot.itemsize


def _nbytes(piece: Piece, itemsizes: Sequence[int]) -> int:
    return (piece.end - piece.begin) * itemsizes[piece.parameter]


def aligned(at: int) -> int:
    return -(-at // _core.ALIGNMENT_BYTES) * _core.ALIGNMENT_BYTES
