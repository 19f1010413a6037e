"""The layout of a journal: no two items in one place, and every element in one block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.sharding.journal_layout import Slot, aligned, lay_out_journal, slot_bytes
from paceline.sharding.partition import CUT_ELEMENTS, Extent, Piece, cut_evenly, split_into_blocks

SIZES = (5000, 1, 0, 130, 2 * CUT_ELEMENTS, 100_003)
SLOTS = [[Slot("step", "float32", 4, ()), Slot("mean", "float32", 4, None)]]


def pieces_of(world_size: int, block_bytes: int) -> list[Piece]:
    whole = cut_evenly([Extent(size, 4) for size in SIZES], world_size)
    return split_into_blocks(whole, [4] * len(SIZES), block_bytes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("block_bytes", [1, 1024, 3000, 1 << 20])
def test_blocks_cover_every_element_once(world_size: int, block_bytes: int) -> None:
    pieces = pieces_of(world_size, block_bytes)
    for parameter, size in enumerate(SIZES):
        seen = np.zeros(size, int)
        for piece in pieces:
            if piece.parameter == parameter:
                seen[piece.begin : piece.end] += 1
                assert piece.is_whole == (piece.end - piece.begin == size)
                assert piece.is_whole or piece.end - piece.begin >= CUT_ELEMENTS
                assert piece.begin % CUT_ELEMENTS == 0
                assert 4 * (piece.end - piece.begin) <= max(block_bytes, 8 * CUT_ELEMENTS)
        assert (seen == 1).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("block_bytes", [1, 1024, 1 << 20])
def test_nothing_lies_in_the_same_place(world_size: int, block_bytes: int) -> None:
    pieces = pieces_of(world_size, block_bytes)
    slots = SLOTS * len(pieces)
    layout = lay_out_journal(pieces, [4] * len(SIZES), slots, world_size, block_bytes)
    ranges = [(at, at + 1) for at in (*layout.has_state, *layout.is_ready)]
    for piece, its, places in zip(pieces, slots, layout.state, strict=True):
        ranges += [(at, at + slot_bytes(slot, piece)) for slot, at in zip(its, places, strict=True)]
    for rank, (blocks, at) in enumerate(zip(layout.blocks, layout.kept, strict=True)):
        assert all(pieces[number].rank == rank for block in blocks for number in block)
        largest = 0
        for block in blocks:
            kept = 0
            for number in block:
                piece = pieces[number]
                sizes = [1, 4 * (piece.end - piece.begin), *(slot_bytes(slot, piece) for slot in SLOTS[0])]
                kept += sum(map(aligned, sizes))
            largest = max(largest, kept)
        ranges.append((at, at + largest))
    ranges.sort()
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert end <= begin
    assert ranges[-1][1] <= layout.nbytes
    assert sorted(n for own in layout.blocks for block in own for n in block) == list(range(len(pieces)))
