"""Shards of parameters: every element dealt once, evenly, and never cut where that would change a bit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.sharding.partition import (
    CUT_ELEMENTS,
    Extent,
    Piece,
    cut_evenly,
    deal,
    deal_whole,
    fit_into_caches,
)

EXTENTS = st.lists(
    st.builds(Extent, st.integers(0, 5000), st.sampled_from([2, 4, 8]), st.booleans()), max_size=12
)


@given(EXTENTS, st.integers(1, 6))
def test_every_element_is_dealt_once_and_in_order(extents: list[Extent], world_size: int) -> None:
    pieces = cut_evenly(extents, world_size)
    assert [piece.rank for piece in pieces] == sorted(piece.rank for piece in pieces)
    for index, extent in enumerate(extents):
        own = [piece for piece in pieces if piece.parameter == index]
        assert own[0].begin == 0 and own[-1].end == extent.numel
        assert [piece.end for piece in own[:-1]] == [piece.begin for piece in own[1:]]
        assert all(piece.is_whole == (len(own) == 1) for piece in own)
        if not extent.may_be_cut:
            assert len(own) == 1
        for piece in own[1:]:
            assert piece.begin % CUT_ELEMENTS == 0
            assert min(piece.begin, extent.numel - piece.begin) >= CUT_ELEMENTS


@given(EXTENTS, st.integers(1, 6))
def test_ranks_get_equally_many_bytes_but_for_what_cannot_be_cut(
    extents: list[Extent], world_size: int
) -> None:
    loads = [0] * world_size
    for piece in cut_evenly(extents, world_size):
        loads[piece.rank] += (piece.end - piece.begin) * extents[piece.parameter].itemsize
    share = sum(extent.nbytes for extent in extents) / world_size
    uncut = max((e.nbytes for e in extents if not e.may_be_cut or e.numel < 2 * CUT_ELEMENTS), default=0)
    assert max(loads) <= share + max(uncut, 2 * CUT_ELEMENTS * 8)


def test_an_example() -> None:
    pieces = cut_evenly([Extent(1000, 4), Extent(256, 4)], 2)
    found = [(piece.parameter, piece.begin, piece.end, piece.is_whole, piece.rank) for piece in pieces]
    assert found == [(0, 0, 640, False, 0), (0, 640, 1000, False, 1), (1, 0, 256, True, 1)]


@given(EXTENTS, st.integers(1, 6))
def test_whole_parameters_are_balanced_and_the_balance_goes_on(
    extents: list[Extent], world_size: int
) -> None:
    loads = [0] * world_size
    pieces = deal_whole(extents, loads)
    assert [piece.parameter for piece in pieces] == list(range(len(extents)))
    assert all(piece.is_whole and piece.end == extents[piece.parameter].numel for piece in pieces)
    own = [sum(extents[p.parameter].nbytes for p in pieces if p.rank == r) for r in range(world_size)]
    assert loads == own
    # No rank has more than another by more than the largest parameter.
    assert max(loads) - min(loads) <= max((extent.nbytes for extent in extents), default=0)
    lightest = loads.index(min(loads))
    assert deal_whole([Extent(1, 4)], loads)[0].rank == lightest


def test_frozen_parameters_and_whole_ones_are_dealt_by_themselves() -> None:
    extents = [Extent(4096, 4)] * 6
    loads = [0, 0]
    pieces = deal(
        extents,
        is_frozen=[False, True, False, True, False, False],
        is_cut=[True, True, False, True, True, False],
        loads=loads,
    )
    found = {piece.parameter: (piece.rank, piece.is_whole) for piece in pieces}
    assert len(pieces) == len(found)
    # Parameters 0 and 4 are trained and may be cut, 2 and 5 are trained and whole, 1 and 3 are frozen.
    for one, other in [(0, 4), (2, 5), (1, 3)]:
        assert {found[one], found[other]} == {(0, True), (1, True)}
    assert loads == [4096 * 4] * 2


@given(EXTENTS, st.integers(1, 4), st.integers(1, 8000), st.data())
def test_pieces_that_fit_hold_the_same_elements_of_each_rank(
    extents: list[Extent], world_size: int, cached_bytes: int, data: st.DataObject
) -> None:
    is_cut = data.draw(st.lists(st.booleans(), min_size=len(extents), max_size=len(extents)))
    dealt = cut_evenly(extents, world_size)
    fitting = fit_into_caches(dealt, extents, is_cut, cached_bytes)
    rest = iter(fitting)
    for piece in dealt:
        extent, parts = extents[piece.parameter], [next(rest)]
        while parts[-1].end < piece.end:
            parts.append(next(rest))
        assert (parts[0].begin, parts[-1].end) == (piece.begin, piece.end)
        assert [part.end for part in parts[:-1]] == [part.begin for part in parts[1:]]
        assert {(part.parameter, part.rank) for part in parts} == {(piece.parameter, piece.rank)}
        if not (is_cut[piece.parameter] and extent.may_be_cut):
            assert parts == [piece]
            continue
        most = 1.5 * cached_bytes + 2 * CUT_ELEMENTS * extent.itemsize
        assert all((part.end - part.begin) * extent.itemsize <= most for part in parts)
        if len(parts) == 1:
            assert parts == [piece]
            continue
        for part in parts:
            assert not part.is_whole and part.end - part.begin >= CUT_ELEMENTS
            assert (part.begin - piece.begin) % CUT_ELEMENTS == 0
    assert next(rest, None) is None


def test_an_example_of_pieces_that_fit() -> None:
    whole = Piece(0, 0, 1030, True, 0)
    found = fit_into_caches([whole], [Extent(1030, 4)], [True], 1024)
    assert [(piece.begin, piece.end) for piece in found] == [(0, 256), (256, 512), (512, 768), (768, 1030)]
    assert fit_into_caches([whole], [Extent(1030, 4)], [False], 1024) == [whole]
    assert fit_into_caches([whole], [Extent(1030, 4)], [True], 2800) == [whole]
