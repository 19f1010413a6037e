"""The benchmarks' command line, their cases, and results from given samples; nothing is measured."""

from __future__ import annotations

import argparse
import sys
from typing import Any, ClassVar

import pytest

from benchmarks import all_reduce, data, killed, memory, optimizer, start, step, throughput
from benchmarks.__main__ import BENCHMARKS, main, parser
from benchmarks.runner import Case, Runner, Settings, Timing, choose


def parse(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(arguments)


def test_arguments_are_read():
    arguments = parse("all_reduce", "--ranks", "4", "--sizes", "4,16KiB", "--only", "gloo, paceline_any")
    assert (arguments.ranks, arguments.sizes, arguments.only) == (4, (4, 16384), ("gloo", "paceline_any"))
    assert parse("step", "--models", "toy").models == ("toy",)
    assert parse("hook").ranks == 1 and parse("start").starts == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("all_reduce", "--ranks", "1"), "at least 2"),
        (("all_reduce", "--rounds", "x"), "at least 1"),
        (("all_reduce", "--sizes", "16K"), "'16K' is no size"),
        (("killed", "--resident", "-1"), "at least 0"),
        (("data", "--length", "10"), "at least 1000"),
        (("trace", "--sample-s", "0"), "'0' is not a number of seconds"),
        (("walk",), "invalid choice"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, complaint):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("all_reduce", "--only", "glue"), "unknown glue"),
        (("step", "--models", "resnet"), "unknown resnet"),
        (("throughput", "--models", "toy"), "unknown toy"),
        (("throughput", "--ranks", "3", "--models", "rl"), "cannot be cut into equal parts"),
        (("memory", "--of", "training", "--only", "torch"), "unknown torch"),
        (("step", "--before", "/no/such/python"), "no such program"),
        (("step", "--output", "/no/such/folder"), "no such folder"),
    ],
)
def test_what_only_shows_at_run_time_is_reported_before_anything_starts(capsys, arguments, complaint):
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


LISTS = (
    all_reduce.CASES,
    killed.CASES,
    data.CASES,
    start.CASES,
    optimizer.CASES,
    throughput.cases_for(4),
    *memory.CASES.values(),
    *step.CASES.values(),
    step.CASES_OF_OPTIONS,
)


@pytest.mark.parametrize("cases", LISTS)
def test_cases_have_different_names(cases):
    assert len({case.key for case in cases}) == len(cases)
    assert len({case.label for case in cases}) == len(cases)


def test_every_benchmark_has_cases_without_options_of_its_own():
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.cases(parse(name))


def test_absent_cases_are_reported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    able, absent = Settings(all_reduce.CASES, 2, 1).able()
    assert {case.key for case in able} == {"paceline_region", "paceline_any"}
    assert "Gloo is absent: torch is not installed." in absent
    assert "Open MPI is absent: mpi4py is not installed." in absent


def test_each_of_our_cases_runs_a_second_time_with_another_interpreter():
    cases = choose(all_reduce.CASES, ("gloo", "paceline_any"), "/other/python")
    assert [case.key for case in cases] == ["paceline_any", "before_paceline_any", "gloo"]
    now, before, _ = (case.launch(2) for case in cases)
    assert (now.python, before.python, before.cores) == (sys.executable, "/other/python", now.cores)
    assert cases[0].target == cases[1].target
    assert not cases[1].is_ours  # a failure there is no failure of this version


# --- steps ---


def test_overhead_is_over_alone():
    timings = {
        "alone": Timing(1, [[1.0, 1.0], [1.0, 1.0]]),
        "torch": Timing(1, [[1.5, 1.5], [1.0, 1.0]]),
    }
    assert step.overheads(timings)["torch"].median == 0.5
    assert step.overheads({"torch": timings["torch"]}) == {}


# --- throughput ---


def test_the_slowest_rank_decides_how_fast_all_are():
    timing = Timing(1, [[0.1, 0.1, 0.4], [0.1, 0.2, 0.4]])
    assert throughput.speed(timing, 64) == throughput.Speed(320.0, 160.0, 640.0)


def test_a_rank_by_itself_is_compared_by_its_part_of_the_batch():
    timings = {
        "one": Timing(1, [[0.8, 0.8]]),
        "solo": Timing(1, [[0.4, 0.4]]),
        "torch": Timing(1, [[1.0, 1.0], [0.9, 1.0]]),
        "paceline": Timing(1, [[0.4, 0.5], [0.5, 0.5]]),
    }
    waits = [{"optimizer_s": 0.1, "waited_s": 0.02}, {"optimizer_s": 0.2, "waited_s": 0.0}]
    measured = throughput.Measured(
        64, 2, timings, {"paceline": waits, "torch": [{"optimizer_s": 1, "waited_s": None}]}
    )
    assert measured.faster("paceline", "one").median == pytest.approx(1.6)
    assert measured.faster("paceline", "torch").median == pytest.approx(2.0)
    # Two ranks alone would handle 160 samples a second, and these two handle 128.
    assert measured.of_ideal("paceline") == pytest.approx(0.8)
    assert measured.of_ideal("one") == pytest.approx(0.5)
    assert measured.faster("paceline", "zero") is None
    assert (measured.optimizer_s("paceline"), measured.waited_s("paceline")) == (0.2, 0.01)
    assert measured.waited_s("torch") is None


def test_a_rank_by_itself_has_its_part_and_one_process():
    found = {case.key: case for case in throughput.cases_for(4)}
    assert found["solo"].options == {"parts": 4, "threads": 1}
    assert (found["one"].processes, found["solo"].processes, found["alone"].processes) == (1, 1, 0)


# --- optimizer ---


def cases_of(*keys: str) -> list[Case]:
    return [case for case in optimizer.CASES if case.key in keys]


def test_every_case_of_an_optimizer_is_measured():
    assert {case.key for case in optimizer.CASES} == {
        *optimizer.COMPARED,
        *(key for keys in optimizer.TOGETHER for key in keys),
    }
    assert optimizer.turns(cases_of("whole", "paceline_shared")) == [["paceline_shared"]]
    assert optimizer.turns(cases_of("whole", "zero")) == [[]]


def test_a_case_is_compared_in_its_own_rounds_and_with_the_faster_zero():
    first = {
        "whole": Timing(1, [[4.0, 4.0], [4.0, 8.0]]),
        "zero": Timing(1, [[3.0, 3.0], [3.0, 3.0]]),
        "zero_view": Timing(1, [[2.0, 2.0], [2.0, 2.0]]),
        "paceline": Timing(1, [[1.0, 2.0], [1.0, 1.0]]),
    }
    cases = {key: optimizer.Measured(key, first) for key in first}
    second = {"whole": Timing(1, [[9.0, 9.0]]), "paceline_shared": Timing(1, [[3.0, 3.0]])}
    cases["paceline_shared"] = optimizer.Measured("paceline_shared", second)
    assert cases["paceline"].faster_than("whole").median == pytest.approx(4.0)
    assert cases["paceline"].faster_than_zero().median == pytest.approx(1.5)
    assert cases["paceline_shared"].faster_than("whole").median == pytest.approx(3.0)
    assert cases["paceline_shared"].faster_than_zero() is None
    rows = optimizer.table(cases_of(*cases, "paceline_group"), "AdamW", cases)
    assert [len(row) for row in rows] == [7] * 6
    by_label = {row[1]: row[2:] for row in rows}
    assert by_label["the whole step on each rank"][1:] == ["-"] * 4
    assert by_label["ZeroRedundancyOptimizer, bucket view"][3:] == ["-"] * 2
    assert by_label["Paceline, over Gloo"] == ["failed", *["-"] * 4]


class Recorded(Runner):
    """A runner whose cases are not started: notes which have a large model at a time."""

    large: ClassVar[set[str]] = set()
    most: ClassVar[list[int]] = []

    def __enter__(self) -> Runner:
        return self

    def on_all(self, method: str, during: str, **arguments: Any) -> dict[str, list[Any]]:
        keys = [case.key for case in self.cases]
        assert method == "prepare"
        (self.large.update if arguments["layers"] > 1 else self.large.difference_update)(keys)
        self.most.append(len(self.large))
        return {key: [{"digest": "same"}] * 2 for key in keys}

    def measure(self, during: str, sample_s: float, at_most: int = 1) -> dict[str, Timing]:
        assert {case.key for case in self.cases} == self.large
        return {key: Timing(1, [[1.0] * 3] * 2) for key in self.large}


def test_the_models_that_exist_at_a_time_are_those_that_take_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optimizer, "Runner", Recorded)
    report = optimizer.run(Settings(optimizer.CASES, 2, 3), parse("optimizer"))
    assert max(Recorded.most) == len(optimizer.COMPARED) + 2 and not Recorded.large
    cases = {(row["optimizer"], row["case"]) for row in report.data["rows"]}
    assert cases == {(name, case.key) for name in optimizer.OPTIMIZERS for case in optimizer.CASES}
    rows = [row for row in report.rows if row]
    assert [len(row) for row in rows] == [7] * len(optimizer.OPTIMIZERS) * len(optimizer.CASES)
    assert len(report.columns) == 7


# --- start ---


IMPORTTIME = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   torch._C
import time:      2000 |       2100 | torch
import time:         7 |          7 |     decimal
import time:        30 |         37 |   paceline.env
import time:        40 |         77 | paceline.torch
warning: something else
"""


def test_import_times_are_read_with_their_depth():
    assert start.parse_import_times(IMPORTTIME) == [
        start.Import("torch._C", 100e-6, 100e-6, 1),
        start.Import("torch", 2000e-6, 2100e-6, 0),
        start.Import("decimal", 7e-6, 7e-6, 2),
        start.Import("paceline.env", 30e-6, 37e-6, 1),
        start.Import("paceline.torch", 40e-6, 77e-6, 0),
    ]


@pytest.fixture
def without_torch(monkeypatch):
    """Settings with one case: a process that starts and ends."""
    monkeypatch.setattr(start, "no_torch", lambda: "")
    monkeypatch.setattr(start, "_imports", lambda: start.parse_import_times(IMPORTTIME))
    only = start._case("paceline", "nothing", "none", "import")

    def settings(program: str) -> Settings:
        monkeypatch.setattr(start, "_PROGRAMS", {"import": program})
        return Settings((only,), 2, 3)

    return settings


def test_each_start_is_timed_and_the_imports_are_reported(without_torch):
    settings = without_torch('import time; time.sleep(0.05); print("wrapped")\n')
    report = start.run(settings, parse("start"))
    assert report.is_complete
    assert len(report.data["rows"]["paceline"]) == 3
    assert all(sample["seconds"] >= 0.05 for sample in report.data["rows"]["paceline"])
    (line,) = [note for note in report.notes if "importtime" in note]
    assert "torch 2.1 ms" in line or "torch 2.10 ms" in line
    assert "2 modules of its own 70" in line
    assert "1 others 7" in line


@pytest.mark.parametrize(
    ("program", "why"),
    [("print('something else')", "it wrote nothing"), ("raise SystemExit('no group')", "no group")],
)
def test_a_program_that_does_not_wrap_is_not_timed(without_torch, program, why):
    report = start.run(without_torch(program), parse("start"))
    assert not report.is_complete
    assert report.data["rows"]["paceline"] == []
    assert any(why in note for note in report.notes)
