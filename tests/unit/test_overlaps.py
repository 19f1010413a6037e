"""The ranges of memory that overlap, against a look at every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.torch.backward.accumulated import overlapping

_PIECES = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=8)


@given(_PIECES)
def test_every_piece_that_overlaps_with_any_other_is_found(pieces: list[tuple[int, int]]) -> None:
    covers = [set(range(begin, begin + length)) for begin, length in pieces]
    expected = {
        i for i, own in enumerate(covers) if any(own & other for j, other in enumerate(covers) if j != i)
    }
    extents = [(begin, length, index) for index, (begin, length) in enumerate(pieces)]
    assert overlapping(extents) == expected
