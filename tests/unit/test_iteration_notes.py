"""The notes that ranks exchange at the end of a backward, and the conclusions from them."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import _core
from paceline.errors import ReplicasDifferError
from paceline.reducer.backward.replica_drift import (
    NOTHING,
    DriftWatch,
    Note,
    describe_writes,
    dropped_warning,
    places_to_sample,
    turns_of,
)
from paceline.reducer.replica_hashes import Entry


@given(st.integers(0, 1023), st.integers(0, 4095), st.integers(0, 255), st.booleans())
def test_a_note_is_32_bits_and_not_nothing(
    writes: int, sampled: int, dropped: int, accumulated: bool
) -> None:
    note = Note(writes, sampled, dropped, accumulated)
    assert 0 < note.pack() < 1 << 32
    assert Note.unpack(note.pack()) == note
    assert Note.unpack(NOTHING) is None


def test_large_numbers_keep_their_last_bits() -> None:
    assert Note.unpack(Note(-1, (1 << 64) - 1, 1000).pack()) == Note(1023, 4095, 255)


def test_notes_are_of_what_was_done_since_the_backward_before() -> None:
    writes = [5]
    notes = _core.IterationNotes(lambda: writes[0], lambda _: 7)
    assert notes.take(forwards=1, accumulated=False) == NOTHING  # the first backward has no other before it
    notes.begin(forwards=1, backward=1)
    writes[0] += 2
    notes.batches = 3
    assert Note.unpack(notes.take(forwards=2, accumulated=True)) == Note(2, 7, 2, True)
    assert notes.take(forwards=2, accumulated=False) == NOTHING  # a void backward was before it
    notes.begin(forwards=2, backward=2)
    assert Note.unpack(notes.take(forwards=9, accumulated=False)) == Note(0, 7)


def test_without_a_count_the_sample_shows_whether_there_was_a_write() -> None:
    values = np.zeros(3)
    notes = _core.IterationNotes(None, lambda _: _core.sample_all([values.ctypes.data], [values.nbytes]))
    for written in (0, 1, 0):
        notes.begin(0, 0)
        values += written
        note = Note.unpack(notes.take(0, accumulated=False))
        assert note is not None and note.writes == written


@given(st.lists(st.integers(0, 10_000)))
def test_samples_are_within_few_at_a_time_and_of_each_parameter(sizes: list[int]) -> None:
    places = places_to_sample(sizes)
    turns = turns_of(places)
    taken = [places[turn::turns] for turn in range(turns)]
    assert all(len(each) <= 4 for each in taken) and turns <= len(sizes) // 4 + 1
    assert sorted(index for each in taken for index, *_ in each) == [
        i for i, size in enumerate(sizes) if size
    ]
    for index, begin, size in places:
        assert 0 < size <= 128 and begin >= 0 and begin + size <= sizes[index]


def test_who_did_what_is_reported_only_where_it_differs() -> None:
    assert describe_writes([Note(1), Note(1)]) == dropped_warning([Note(1), Note(1)]) == ""
    assert describe_writes([Note(1), Note(0), Note(1)]).endswith(": ranks 0, 2: 1; rank 1: 0")
    assert "rank 0: 0; rank 1: 2" in dropped_warning([Note(), Note(dropped=2)])


class Replicas:
    """The replicas of two ranks; counts comparisons."""

    def __init__(self, differ: bool) -> None:
        self.differ = differ
        self.num_checks = 0

    def hash(self, optimizer: object) -> list[Entry]:
        self.num_checks += 1
        return [Entry("parameter", "w", 1)]

    def gather(self, payload: bytes) -> list[bytes]:
        if not self.differ:
            return [payload, payload]
        other = json.dumps([("parameter", "w", 2)]).encode()
        return [payload, b"another" if len(payload) == 8 else other]

    def watch(self, every: int | None = None) -> DriftWatch:
        return DriftWatch(every, self.hash, self.gather)


def end_backward(watch: DriftWatch, notes: list[int]) -> None:
    watch.backwards += 1
    watch.look(notes)


def packed(*notes: Note) -> list[int]:
    return [note.pack() for note in notes]


SKIPPED = packed(Note(1, 5), Note(0, 6))
DRIFTED = packed(Note(1, 5), Note(1, 6))
LOCAL = packed(Note(1, 5, accumulated=True), Note(0, 6))


@pytest.mark.parametrize(
    ("notes", "every", "ends_in"),
    [
        (SKIPPED, None, "error"),
        (DRIFTED, None, "warning"),
        (LOCAL, None, "warning"),
        (SKIPPED, 0, "nothing"),
        (DRIFTED, 0, "nothing"),
        (DRIFTED, 1000, "error"),
        (LOCAL, 1000, "error"),
        ([SKIPPED[0], NOTHING], None, "nothing"),
    ],
)
def test_what_a_difference_ends_in(notes: list[int], every: int | None, ends_in: str) -> None:
    replicas = Replicas(differ=True)
    watch = replicas.watch(every)
    if ends_in == "error":
        with pytest.raises(ReplicasDifferError, match="parameter 'w'"):
            end_backward(watch, notes)
    elif ends_in == "warning":
        with pytest.warns(RuntimeWarning, match="The 2 replicas of the model differ"):
            end_backward(watch, notes)
        end_backward(watch, notes)  # not again
    else:
        end_backward(watch, notes)
        assert not replicas.num_checks


def test_replicas_that_are_equal_all_the_same_are_not_compared_in_each_backward() -> None:
    replicas = Replicas(differ=False)
    watch = replicas.watch()
    for _ in range(250):
        end_backward(watch, SKIPPED)
    assert replicas.num_checks == 3


def test_dropped_batches_are_reported_once() -> None:
    watch = Replicas(differ=True).watch()
    notes = packed(Note(1, 5), Note(1, 5, dropped=1))
    with pytest.warns(RuntimeWarning, match=r"rank 0: 0; rank 1: 1"):
        end_backward(watch, notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        end_backward(watch, notes)
