"""A rank's report on its backward, in one word: made and read by the core, sent by both reducers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.reducer.reducer_interface import BackwardStatus

LARGEST = (1 << 20) - 1  # a number of forwards
LARGEST_DIGEST = (1 << BackwardStatus.DIGEST_BITS) - 1
LARGEST_INDEX = (1 << 32) - 1
STATUSES: list[dict[str, Any]] = [
    {"forwards": 0},
    {"forwards": 3},
    {"forwards": 3, "reached": 1},
    {"forwards": 3, "reached": 3},
    {"forwards": LARGEST},
    {"forwards": LARGEST, "reached": LARGEST},
    {"forwards": 2, "static_graph": True},
    {"forwards": 2, "frozen": 0},
    {"forwards": 2, "reached": 1, "frozen": 7},
    {"forwards": LARGEST, "frozen": LARGEST_DIGEST},
    {"forwards": 2, "wrote_buffers": True},
    {"forwards": 2, "reached": 1, "frozen": 7, "wrote_buffers": True},
    {"forwards": 2, "static_graph": True, "wrote_buffers": True},
    {"forwards": 2, "reached": 1, "inputs": LARGEST_DIGEST, "wrote_buffers": True},
    {"forwards": 2, "static_graph": True, "inputs": 1},
    {"refused": 0},
    {"refused": LARGEST_INDEX},
    {"twice": 0},
    {"twice": LARGEST_INDEX},
    {"graph_changed": True},
    {"finished": True},
    {"interrupted": True},
]
STATUSES += [{**fields, "stops": True} for fields in STATUSES]


@pytest.mark.parametrize("fields", STATUSES, ids=str)
def test_a_status_word_keeps_all_its_fields(fields):
    status = BackwardStatus(**fields)
    again = BackwardStatus.unpack(status.pack())
    assert again == status
    assert {name: getattr(again, name) for name in fields} == fields
    assert status.pack() < 1 << 64


def test_no_two_say_the_same():
    assert len({BackwardStatus(**fields).pack() for fields in STATUSES}) == len(STATUSES)


@pytest.mark.parametrize(
    ("fields", "agree"),
    [
        ([(1, 1), (1, 1)], True),
        ([(5, 5), (3, 3), (1, 1)], True),  # different numbers of forwards
        ([(5, 4), (3, 2)], True),  # the same, and in each the last output is not used
        ([(2, 2), (2, 1), (2, 0)], True),  # outputs that some ranks do not use
        ([(2, 1), (1, 1)], False),  # a skipped backward
        ([(1, 1), (1, 1), (3, 1)], False),
        ([(2, 1), (2, 2), (1, 1)], False),
        ([(2, 2), (2, 1), (1, 1)], False),
        ([(1, 1), (2, 1), (2, 2)], False),
        ([(2, 0), (1, 0)], False),  # outputs in which no tensor is found
        ([(0, 0), (0, 0)], True),
        ([(1, 1), (0, 0)], False),  # a backward that only some ranks make
        ([(0, 0), (3, 3), (1, 1)], False),
        ([(3, 3), (0, 0), (1, 1)], False),
        ([(LARGEST, LARGEST), (LARGEST, 0)], True),
    ],
)
def test_ranks_agree_in_forwards_or_in_what_they_left(fields, agree):
    for frozen in (None, 7):
        words = [
            BackwardStatus(forwards, reached=reached, frozen=frozen).pack() for forwards, reached in fields
        ]
        assert BackwardStatus.agree(words) is agree


def test_ranks_with_other_inputs_agree_as_those_with_the_same():
    for promised in (False, True):
        made = [BackwardStatus(2, reached=2, static_graph=promised, inputs=each).pack() for each in (0, 1, 7)]
        skipped = BackwardStatus(3, reached=2, static_graph=promised, inputs=7).pack()
        assert BackwardStatus.agree(made)
        assert not BackwardStatus.agree([*made, skipped])
    assert not BackwardStatus(1, inputs=1).is_plain and BackwardStatus(1, inputs=1).is_count


def without_stops(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "stops"}


def test_ranks_agree_in_all_else_only_if_they_say_the_same():
    words = [BackwardStatus(**fields).pack() for fields in STATUSES]
    # Ranks may write differently, have other inputs, and be asked to stop at different times.
    counts = ("forwards", "reached", "wrote_buffers", "inputs", "stops")
    for one, fields in zip(words, STATUSES, strict=True):
        for other, of_other in zip(words, STATUSES, strict=True):
            if set(fields) <= set(counts) and set(of_other) <= set(counts):
                continue
            if "frozen" in fields and fields.get("frozen") == of_other.get("frozen"):
                continue
            if fields.get("static_graph") and of_other.get("static_graph"):
                continue
            assert BackwardStatus.agree([one, other]) is (without_stops(fields) == without_stops(of_other))
    assert BackwardStatus.agree([])


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ({"refused": 1, "twice": 2, "graph_changed": True}, {"refused": 1}),
        ({"twice": 2, "graph_changed": True, "static_graph": True}, {"twice": 2}),
        ({"graph_changed": True, "static_graph": True, "frozen": 5}, {"graph_changed": True}),
        ({"forwards": 1, "static_graph": True, "frozen": 5}, {"forwards": 1, "static_graph": True}),
        ({"forwards": 1, "static_graph": True, "finished": True}, {"finished": True}),
        ({"refused": 1, "interrupted": True}, {"interrupted": True}),
        ({"forwards": 1, "frozen": 5, "inputs": 9}, {"forwards": 1, "frozen": 5}),
        ({"forwards": 1, "refused": 1, "stops": True}, {"refused": 1, "stops": True}),
    ],
)
def test_of_several_things_the_worst_is_reported(said, fields):
    assert BackwardStatus.unpack(BackwardStatus(**said).pack()) == BackwardStatus(**fields)


def test_what_is_counts_of_forwards():
    plain, promised, frozen = (
        BackwardStatus(1),
        BackwardStatus(1, static_graph=True),
        BackwardStatus(1, frozen=3),
    )
    assert plain.is_plain and plain.is_count
    assert promised.is_count and frozen.is_count and not promised.is_plain and not frozen.is_plain
    for fields in (
        {"refused": 0},
        {"twice": 0},
        {"graph_changed": True},
        {"finished": True},
        {"interrupted": True},
    ):
        assert not BackwardStatus(**fields).is_count and not BackwardStatus(**fields).is_plain


def test_a_promise_outlives_a_backward_and_nothing_else_does():
    status = BackwardStatus(
        2, reached=1, refused=1, twice=1, frozen=1, graph_changed=True, static_graph=True, finished=True
    )
    status.begin_next()
    assert status == BackwardStatus(static_graph=True)
    status.static_graph = False
    assert status == BackwardStatus()


def test_a_field_can_be_taken_back():
    status = BackwardStatus(refused=4)
    status.refused = None
    status.twice = 7
    assert (status.refused, status.twice) == (None, 7)
    assert repr(status) == "BackwardStatus(0, twice=7)"
