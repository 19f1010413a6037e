"""Ranks' reports of frozen parameters, and the comparison of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.reducer.backward_reports import differ_in_frozen_only, digest_of, is_all_unused_frozen
from paceline.reducer.reducer_interface import BackwardStatus

FINISHED = BackwardStatus(finished=True)


def result(statuses: list[BackwardStatus], unused: list[list[int]]) -> Any:
    return SimpleNamespace(statuses=statuses, unused=unused)


def frozen(*indices: int, forwards: int = 1) -> BackwardStatus:
    return BackwardStatus(forwards, frozen=digest_of(indices))


def test_a_digest_travels_whole() -> None:
    for indices in ([0], [1, 5000], range(1000)):
        for forwards in (0, 1, 7):
            status = BackwardStatus.unpack(frozen(*indices, forwards=forwards).pack())
            assert (status.forwards, status.frozen) == (forwards, digest_of(indices))


def test_ranks_differ_in_what_is_frozen_or_in_more() -> None:
    assert differ_in_frozen_only([frozen(0), BackwardStatus(1)])
    assert differ_in_frozen_only([frozen(0), frozen(1), FINISHED])
    assert not differ_in_frozen_only([frozen(0), BackwardStatus(2)])
    assert not differ_in_frozen_only([frozen(0), BackwardStatus(interrupted=True)])
    assert not differ_in_frozen_only([frozen(0), BackwardStatus(1, static_graph=True)])
    assert not differ_in_frozen_only([BackwardStatus(1), BackwardStatus(2)])
    longer = BackwardStatus(2, reached=2, frozen=digest_of([0]))
    assert differ_in_frozen_only([longer, BackwardStatus(1, reached=1)])
    assert not differ_in_frozen_only([longer, BackwardStatus(1, reached=0)])


def test_what_is_unused_and_not_frozen_is_seen_by_all() -> None:
    status = frozen(0, 2)
    assert is_all_unused_frozen(result([status, FINISHED, status], [[0, 2], [], [0, 2]]))
    assert not is_all_unused_frozen(result([status, status], [[0, 2], [0, 1, 2]]))
    assert not is_all_unused_frozen(result([BackwardStatus(1), BackwardStatus(1)], [[0], []]))
