"""What the optimizer's bench says of its samples, and who takes turns with whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from paceline.bench.contest import Contest, Plan, Timing
from paceline.bench.optimizer import COMPARED, ENTRIES, TOGETHER, VARIANTS, _Measured, _rows, _turns, run


def contest_of(*keys: str) -> Any:
    return SimpleNamespace(
        contenders=[SimpleNamespace(entry=entry) for entry in ENTRIES if entry.key in keys]
    )


def test_every_way_takes_part():
    assert {entry.key for entry in ENTRIES} == {*COMPARED, *(key for keys in TOGETHER for key in keys)}
    assert _turns(contest_of("whole", "paceline_shared")) == [["paceline_shared"]]
    assert _turns(contest_of("whole", "zero")) == [[]]


def test_a_way_is_compared_in_its_own_rounds_and_with_the_faster_zero():
    first = {
        "whole": Timing(1, [[4.0, 4.0], [4.0, 8.0]]),
        "zero": Timing(1, [[3.0, 3.0], [3.0, 3.0]]),
        "zero_view": Timing(1, [[2.0, 2.0], [2.0, 2.0]]),
        "paceline": Timing(1, [[1.0, 2.0], [1.0, 1.0]]),
    }
    ways = {key: _Measured(key, first) for key in first}
    second = {"whole": Timing(1, [[9.0, 9.0]]), "paceline_shared": Timing(1, [[3.0, 3.0]])}
    ways["paceline_shared"] = _Measured("paceline_shared", second)
    assert ways["paceline"].faster_than("whole").median == pytest.approx(4.0)
    assert ways["paceline"].faster_than_zero().median == pytest.approx(1.5)
    assert ways["paceline_shared"].faster_than("whole").median == pytest.approx(3.0)
    assert ways["paceline_shared"].faster_than_zero() is None
    rows = _rows(contest_of(*ways, "paceline_group"), "AdamW", ways)
    assert [len(row) for row in rows] == [7] * 6
    by_label = {row[1]: row[2:] for row in rows}
    assert by_label["the whole step on each rank"][1:] == ["-"] * 4
    assert by_label["ZeroRedundancyOptimizer, bucket view"][3:] == ["-"] * 2
    assert by_label["Paceline, over Gloo"] == ["failed", *["-"] * 4]


class Recorded(Contest):
    """A contest whose contenders are not started: notes who has a large model at a time."""

    large: ClassVar[set[str]] = set()
    most: ClassVar[list[int]] = []

    def __enter__(self) -> Contest:
        return self

    def on_all(self, method: str, during: str, **arguments: Any) -> dict[str, list[Any]]:
        keys = [contender.entry.key for contender in self.contenders]
        assert method == "prepare"
        (self.large.update if arguments["layers"] > 1 else self.large.difference_update)(keys)
        self.most.append(len(self.large))
        return {key: [{"digest": "same"}] * 2 for key in keys}

    def measure(self, during: str, rounds: int, sample_s: float, at_most: int = 1) -> dict[str, Timing]:
        assert {contender.entry.key for contender in self.contenders} == self.large
        return {key: Timing(1, [[1.0] * rounds] * 2) for key in self.large}


def test_the_models_that_exist_at_a_time_are_those_that_take_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Plan, "contest", lambda plan, entries: Recorded(plan.chosen(entries), 2, plan.say))
    report = run(Plan(2, 3, (), "", lambda line: None), 50_000_000)
    assert max(Recorded.most) == len(COMPARED) + 2 and not Recorded.large
    ways = {(row["variant"], row["way"]) for row in report.data["rows"]}
    assert ways == {(variant, entry.key) for variant in VARIANTS for entry in ENTRIES}
    assert [len(row) for row in report.rows if row] == [7] * len(VARIANTS) * len(ENTRIES)
    assert len(report.columns) == 7
