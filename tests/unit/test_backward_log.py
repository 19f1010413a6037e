"""The records that the backwards of one model leave in the recording of their process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline import _core
from paceline.reducer.backward import backward_log
from paceline.reducer.backward.backward_log import BackwardLog
from paceline.trace.records import Event, backward_id, float_bits


class Recording:
    """A recording that keeps its calls.

    Attributes:
        note: None: nothing is recorded.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []
        self.notes: list[tuple[int, int, int]] = []
        self.forgotten: list[int] = []
        self.note: Any = lambda *record: self.notes.append(record)
        self.is_due = True

    def begin_if_asked(self, rank: int, world_size: int) -> None: ...

    def note_failure(self, error: BaseException) -> None: ...

    def number_model(self, totals: object) -> int:
        return 7

    def note_facts(self, what: str, model: int, **facts: Any) -> None:
        self.calls.append((what, model, facts))

    def sample(self, now_ns: int, number: int) -> bool:
        return self.is_due

    def forget(self, model: int) -> None:
        self.forgotten.append(model)


class Ranks:
    """The object that a log asks how ranks have come to the ends of their backwards."""

    def times(self) -> _core.BackwardTimes:
        return _core.BackwardTimes(2)


RANKS = Ranks()


@pytest.fixture
def recorded(monkeypatch):
    recorded = Recording()
    monkeypatch.setattr(backward_log, "recording", recorded)
    monkeypatch.setattr(backward_log.exit_reports, "at_failure", lambda report: None)
    return recorded


@pytest.fixture
def log(recorded):
    return BackwardLog(1, 2, ["a", "b", "c"], RANKS.times)


def test_backwards_of_a_model_have_numbers_of_their_own(log):
    assert log.before_first == backward_id(7, 0)


def test_a_reader_learns_which_parameters_a_bucket_holds(log, recorded):
    buckets = [SimpleNamespace(nbytes=64, parameters=(2,)), SimpleNamespace(nbytes=128, parameters=(1, 0))]
    log.record_plan(SimpleNamespace(path="memory"), SimpleNamespace(buckets=buckets))
    assert recorded.calls == [
        ("model", 7, {"rank": 1, "world_size": 2, "path": "memory"}),
        ("buckets", 7, {"buckets": [[64, "c"], [128, "b ... a"]]}),
    ]


def test_infinities_are_counted_with_the_first_rank_that_has_one(log, recorded):
    log.note_nonfinite(3, SimpleNamespace(nonfinite=[(1, 0), (0, 2), (1, 2)]))
    log.note_nonfinite(4, SimpleNamespace(nonfinite=[]))
    assert recorded.notes == [(Event.NONFINITE, 3, 3 << 32 | 0)]


def test_a_norm_is_noted_with_a_sample(log, recorded):
    log.sample(0, 3, lambda: 25.0)
    assert recorded.notes == [(Event.NORM, 3, float_bits(5.0))]


def test_a_norm_is_not_computed_for_a_sample(log, recorded):
    log.sample(0, 3, None)
    recorded.is_due = False
    log.sample(0, 4, lambda: pytest.fail("asked"))
    assert recorded.notes == []


def test_a_model_that_is_gone_is_forgotten(log, recorded):
    log.close()
    assert recorded.forgotten == [7]
