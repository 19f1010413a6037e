"""What a rank tells of its pass, in one word: made and read by the core, told by both reducers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.reducer.protocol import PassStatus

LARGEST = (1 << 28) - 1  # forwards, or the index of a parameter
TOLD: list[dict[str, Any]] = [
    {"forwards": 0},
    {"forwards": 3},
    {"forwards": LARGEST},
    {"forwards": 2, "static_graph": True},
    {"forwards": 2, "frozen": 0},
    {"forwards": (1 << 14) - 1, "frozen": (1 << 14) - 1},
    {"refused": 0},
    {"refused": LARGEST},
    {"twice": 0},
    {"twice": LARGEST},
    {"graph_changed": True},
    {"finished": True},
    {"interrupted": True},
]


@pytest.mark.parametrize("told", TOLD, ids=str)
def test_a_word_tells_what_was_said(told):
    status = PassStatus(**told)
    again = PassStatus.unpack(status.pack())
    assert again == status
    assert {name: getattr(again, name) for name in told} == told
    assert status.pack() < 1 << 32


def test_no_two_say_the_same():
    assert len({PassStatus(**told).pack() for told in TOLD}) == len(TOLD)


def test_a_plain_word_is_the_number_itself():
    """As ranks of other versions of the package send it."""
    assert [PassStatus(count).pack() for count in (0, 1, 77)] == [0, 1, 77]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"refused": 1, "twice": 2, "graph_changed": True}, {"refused": 1}),
        ({"twice": 2, "graph_changed": True, "static_graph": True}, {"twice": 2}),
        ({"graph_changed": True, "static_graph": True, "frozen": 5}, {"graph_changed": True}),
        ({"forwards": 1, "static_graph": True, "frozen": 5}, {"forwards": 1, "static_graph": True}),
        ({"forwards": 1, "static_graph": True, "finished": True}, {"finished": True}),
        ({"refused": 1, "interrupted": True}, {"interrupted": True}),
    ],
)
def test_of_several_things_the_worst_is_told(said, told):
    assert PassStatus.unpack(PassStatus(**said).pack()) == PassStatus(**told)


def test_what_is_a_number_of_forwards():
    plain, promised, frozen = PassStatus(1), PassStatus(1, static_graph=True), PassStatus(1, frozen=3)
    assert plain.is_plain and plain.is_count
    assert promised.is_count and frozen.is_count and not promised.is_plain and not frozen.is_plain
    for told in (
        {"refused": 0},
        {"twice": 0},
        {"graph_changed": True},
        {"finished": True},
        {"interrupted": True},
    ):
        assert not PassStatus(**told).is_count and not PassStatus(**told).is_plain


def test_a_promise_outlives_a_pass_and_nothing_else_does():
    status = PassStatus(2, refused=1, twice=1, frozen=1, graph_changed=True, static_graph=True, finished=True)
    status.begin_next()
    assert status == PassStatus(static_graph=True)
    status.static_graph = False
    assert status == PassStatus()


def test_a_field_can_be_taken_back():
    status = PassStatus(refused=4)
    status.refused = None
    status.twice = 7
    assert (status.refused, status.twice) == (None, 7)
    assert repr(status) == "PassStatus(0, twice=7)"
