"""The command line of the bench, without running a bench."""

from __future__ import annotations

import argparse
import sys

import pytest

from paceline.bench import all_reduce, data, killed, memory, start, step, training_memory
from paceline.bench.cli import register
from paceline.bench.contest import Installation, Plan


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="paceline")
    register(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def test_arguments_are_read():
    arguments = parse("all_reduce", "--ranks", "4", "--sizes", "4,16KiB", "--only", "gloo, paceline_any")
    assert (arguments.ranks, arguments.sizes, arguments.only) == (4, (4, 16384), ("gloo", "paceline_any"))
    assert parse("step", "--models", "toy").models == ("toy",)


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
        (("step", "--json", "/no/such/folder/x.json"), "no folder"),
    ],
)
def test_what_only_shows_at_run_time_is_told_before_anything_starts(capsys, arguments, complaint):
    parsed = parse(*arguments)
    assert parsed.func(parsed) == 2
    assert complaint in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_before_anything_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    parsed = parse("all_reduce", "--plot", str(tmp_path / "x.png"))
    assert parsed.func(parsed) == 2
    assert "matplotlib" in capsys.readouterr().err


LISTS = [bench.ENTRIES for bench in (all_reduce, killed, memory, training_memory, data, start)] + list(
    step.ENTRIES.values()
)


@pytest.mark.parametrize("entries", LISTS)
def test_contenders_have_different_names(entries):
    assert len({entry.key for entry in entries}) == len(entries)
    assert len({entry.label for entry in entries}) == len(entries)


def test_absent_contenders_are_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = Plan(2, 1, (), "paceline bench", print)
    able, absent = plan.able(all_reduce.ENTRIES)
    assert {entry.key for entry in able} == {"paceline_region", "paceline_any"}
    assert "Gloo is absent: torch is not installed." in absent
    assert "Open MPI is absent: mpi4py is not installed." in absent


def test_each_of_ours_takes_part_a_second_time_as_it_was_before():
    other = Installation("/other/python", "paceline.observe.bench")
    plan = Plan(2, 1, ("gloo", "paceline_any"), "", print, before=other)
    entries = plan.chosen(all_reduce.ENTRIES)
    assert [entry.key for entry in entries] == ["paceline_any", "before_paceline_any", "gloo"]
    now, before, _ = (entry.launch(2) for entry in entries)
    assert (before.python, before.cores) == ("/other/python", now.cores)
    assert before.package == "paceline.observe.bench"
    assert [entry.target for entry in entries[:2]] == [
        "paceline.bench.on_numpy:PacelineAnyArray",
        "paceline.observe.bench.on_numpy:PacelineAnyArray",
    ]
    assert Installation.of(sys.executable) == Installation(sys.executable, "paceline.bench")
    assert now.python == sys.executable
    assert not entries[1].is_ours  # what fails there is no failure of this version
