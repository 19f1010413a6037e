"""The forms of a bench's report, and the units in it."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.machine import Machine
from paceline.bench.pss import parse_pss
from paceline.bench.report import Report
from paceline.bench.units import format_ratio, format_size, format_time, parse_size

MACHINE = Machine(
    processor="Intel(R) Xeon(R) CPU @ 2.50GHz",
    cores=2,
    memory_gib=24,
    load=0.1,
    kernel="Linux 6.1",
    versions={"Python": "3.11.7"},
    date="2026-11-21T08:00:00Z",
)


def make_report() -> Report:
    return Report(
        theme="all_reduce",
        title="all_reduce, 2 ranks",
        command="paceline bench all_reduce",
        machine=MACHINE,
        columns=["bytes", "Paceline", "Gloo"],
        rows=[["4 B", "1.00 us", "192 us"], [], ["25 MiB", "3.20 ms", "failed"]],
        notes=["Gloo failed: rank 1 died"],
        data={"rows": [{"samples_s": [[1e-6], [2e-6]]}]},
    )


def test_markdown_holds_the_table_the_command_and_the_machine():
    text = make_report().as_markdown()
    assert "$ paceline bench all_reduce" in text
    assert "Xeon" in text and "2 cores" in text
    assert "| bytes | Paceline | Gloo |\n|---|--:|--:|\n| 4 B | 1.00 us | 192 us |\n| 25 MiB |" in text
    assert "- Gloo failed: rank 1 died" in text


def test_a_result_written_to_a_folder_names_itself(tmp_path):
    path = make_report().write_markdown(tmp_path)
    assert path == tmp_path / "all_reduce_xeon-2.50ghz-2c_2026-11-21.md"
    assert path.read_text() == make_report().as_markdown()


def test_json_holds_every_sample(tmp_path):
    make_report().write_json(tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["rows"][0]["samples_s"] == [[1e-6], [2e-6]]
    assert content["machine"]["cores"] == 2
    assert content["command"] == "paceline bench all_reduce"


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_table_is_shown_with_and_without_rich(monkeypatch, capsys, has_rich):
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    make_report().show()
    shown = capsys.readouterr().out
    for text in ("192 us", "25 MiB", "failed", "Gloo failed: rank 1 died", "2 cores usable"):
        assert text in shown


def test_this_machine_describes_itself():
    machine = Machine.here()
    assert machine.cores >= 1 and machine.memory_gib >= 1
    assert machine.processor and " " not in machine.slug and "/" not in machine.slug
    assert "Python" in machine.versions


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4", 4), ("16KiB", 16384), ("25 MiB", 26214400), ("1gib", 1 << 30), ("8b", 8), ("100MB", 10**8)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "16K", "-4", "0", "5", "1.5MiB", "4 4"])
def test_bad_sizes_are_refused_by_name(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@given(st.sampled_from(["B", "KiB", "MiB", "GiB"]), st.integers(1, 255))
def test_sizes_survive_being_written_and_read(unit, number):
    nbytes = parse_size(f"{4 * number}{unit}")
    assert parse_size(format_size(nbytes)) == nbytes or nbytes >= 1024


def test_times_and_ratios_have_two_or_three_digits():
    assert [format_time(t) for t in (3.2e-7, 9.996e-4, 1.92e-3, 0.0299, 2.0, -1.5e-3)] == [
        "0.32 us",
        "1.00 ms",
        "1.92 ms",
        "29.9 ms",
        "2 s",
        "-1.50 ms",
    ]
    assert [format_ratio(r) for r in (213.4, 19.96, 2.54)] == ["213x", "20.0x", "2.5x"]


def test_pss_is_read_from_a_rollup_without_the_pages_of_files():
    head = "5581e000-7ffe ---p 00000000 00:00 0 [rollup]\nRss: 9000 kB\nPss:  4500 kB\nPss_Dirty: 3 kB\n"
    assert parse_pss(head) == 4500 * 1024
    assert parse_pss(f"{head}Pss_Anon: 300 kB\nPss_File: 4000 kB\nPss_Shmem: 200 kB\n") == 500 * 1024
