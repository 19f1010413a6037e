"""What ranks tell of frozen parameters, and whether they find the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.reducer.frozen import (
    differ_in_frozen_only,
    frozen_status,
    is_all_unused_frozen,
    tells_frozen,
    without_frozen,
)
from paceline.reducer.protocol import FINISHED, INTERRUPTED, REFUSED, STATIC, TWICE


def reducer(statuses: list[int], unused: list[list[int]]) -> Any:
    return SimpleNamespace(forwards_by_rank=lambda: statuses, unused=lambda rank: unused[rank])


def test_a_status_is_told_from_all_others() -> None:
    others = [0, 1, 1 << 20, STATIC, STATIC + 3, TWICE + 5, REFUSED + 5, FINISHED, INTERRUPTED]
    assert not any(map(tells_frozen, others)) and without_frozen(others) == others
    for frozen in ([0], [1, 5000], list(range(1000))):
        for count in (0, 1, 7):
            status = frozen_status(count, frozen)
            assert tells_frozen(status) and without_frozen([status]) == [count]


def test_ranks_differ_in_what_is_frozen_or_in_more() -> None:
    assert differ_in_frozen_only([frozen_status(1, [0]), 1])
    assert differ_in_frozen_only([frozen_status(1, [0]), frozen_status(1, [1]), FINISHED])
    assert not differ_in_frozen_only([frozen_status(1, [0]), 2])
    assert not differ_in_frozen_only([frozen_status(1, [0]), INTERRUPTED])
    assert not differ_in_frozen_only([frozen_status(1, [0]), STATIC + 1])
    assert not differ_in_frozen_only([1, 2])


def test_what_is_unused_and_not_frozen_is_seen_by_all() -> None:
    status = frozen_status(1, [0, 2])
    assert is_all_unused_frozen(reducer([status, FINISHED, status], [[0, 2], [], [0, 2]]))
    assert not is_all_unused_frozen(reducer([status, status], [[0, 2], [0, 1, 2]]))
    assert not is_all_unused_frozen(reducer([1, 1], [[0], []]))
