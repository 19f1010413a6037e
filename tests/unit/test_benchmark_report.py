"""Reports of benchmarks, and the arithmetic of their samples."""

from __future__ import annotations

import argparse
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory import parse_pss
from benchmarks.report import Machine, Report
from benchmarks.samples import (
    Interval,
    interval,
    iterations_for,
    overhead,
    overhead_cells,
    ratio,
    slowest_by_round,
    slowest_median,
)
from paceline.units import format_ratio, format_size, format_time, listed, size

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
        command="python -m benchmarks all_reduce",
        machine=MACHINE,
        columns=["bytes", "Paceline", "Gloo"],
        rows=[["4 B", "1.00 us", "192 us"], [], ["25 MiB", "3.20 ms", "failed"]],
        notes=["Gloo failed: rank 1 died"],
        data={"rows": [{"samples_s": [[1e-6], [2e-6]]}]},
    )


def test_markdown_holds_the_table_the_command_and_the_machine():
    text = make_report().as_markdown()
    assert "$ python -m benchmarks all_reduce" in text
    assert "Xeon" in text and "2 cores" in text
    assert "| bytes | Paceline | Gloo |\n|---|--:|--:|\n| 4 B | 1.00 us | 192 us |\n| 25 MiB |" in text
    assert "- Gloo failed: rank 1 died" in text


def test_in_a_folder_a_result_names_itself_and_has_json_with_every_sample_beside_it(tmp_path):
    path = make_report().write_markdown(tmp_path)
    assert path == tmp_path / "all_reduce_xeon-2.50ghz-2c.md"
    assert path.read_text() == make_report().as_markdown()
    content = json.loads(path.with_suffix(".json").read_text())
    assert content["rows"][0]["samples_s"] == [[1e-6], [2e-6]]
    assert content["table"][1] == {"bytes": "25 MiB", "Paceline": "3.20 ms", "Gloo": "failed"}
    assert content["machine"]["cores"] == 2
    assert content["command"] == "python -m benchmarks all_reduce"


def test_the_table_is_shown(capsys):
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
    assert size(text) == nbytes
    assert listed(size)(f"{text}, 4") == (nbytes, 4)


@pytest.mark.parametrize("text", ["", "x", "16K", "-4", "0", "5", "1.5MiB", "4 4"])
def test_bad_sizes_are_refused_by_name(text):
    with pytest.raises(argparse.ArgumentTypeError, match="size"):
        size(text)


@given(st.sampled_from(["B", "KiB", "MiB", "GiB"]), st.integers(1, 255))
def test_sizes_survive_being_written_and_read(unit, number):
    nbytes = size(f"{4 * number}{unit}")
    assert size(format_size(nbytes)) == nbytes or nbytes >= 1024


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


times = st.floats(1e-9, 100)


def test_iterations_fill_a_sample():
    assert iterations_for(0.001, 0.02, 10_000) == 20
    assert iterations_for(0.0030001, 0.02, 10_000) == 7
    assert iterations_for(5.0, 0.02, 10_000) == 1
    assert iterations_for(1e-7, 0.02, 10_000) == 10_000


@given(times, times)
def test_iterations_stay_in_their_bounds(seconds, sample):
    assert 1 <= iterations_for(seconds, sample, 500) <= 500


def test_a_job_is_as_fast_as_its_slowest_rank():
    samples = [[1.0, 9.0, 1.0], [2.0, 2.0, 2.0]]
    assert slowest_median(samples) == 2.0
    assert slowest_by_round(samples) == [2.0, 9.0, 2.0]


def test_overhead_is_taken_round_by_round():
    # A slow second round hits both and cancels out.
    alone = [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]
    with_it = [[1.5, 2.5, 1.6], [1.2, 2.4, 1.7]]
    assert overhead(with_it, alone).median == pytest.approx(0.5)


@given(st.lists(times, min_size=1, max_size=60))
def test_the_interval_holds_the_median_and_is_made_of_samples(values):
    found = interval(values)
    assert found.median == statistics.median(values)
    assert found.low <= found.median <= found.high
    assert {found.low, found.high} <= set(values)


def test_the_interval_narrows_with_more_samples():
    few, many = interval(range(9)), interval(range(900))
    assert (few.low, few.high) == (1, 8)
    assert (many.high - many.low) / 900 < (few.high - few.low) / 9


def test_a_ratio_is_taken_round_by_round():
    slow_second = [[1.0, 2.0, 1.0], [0.5, 0.5, 0.5]]
    assert ratio([[1.1, 2.2, 1.1], [0.1, 0.1, 0.1]], slow_second).median == pytest.approx(1.1)


def test_a_ratio_over_starts_is_the_median_of_their_medians():
    before = [[1.0] * 6]
    now = [[1.3, 1.0, 1.0, 1.1, 1.1, 1.4]]  # three starts of two rounds: 1.15, 1.05, 1.25
    found = ratio(now, before, starts=3)
    assert (found.median, found.low, found.high) == pytest.approx((1.15, 1.05, 1.25))


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (Interval(1e-3, 0.5e-3, 2e-3), Interval(5e-3, 4e-3, 6e-3), "5.0x"),
        # Not distinguishable from zero: only a bound.
        (Interval(1e-3, -1e-3, 2e-3), Interval(5e-3, 4e-3, 6e-3), "> 2.5x"),
        (Interval(-2e-3, -3e-3, -1e-3), Interval(5e-3, 4e-3, 6e-3), "no overhead"),
        # A torch time that is not distinguishable from zero either gives no ratio.
        (Interval(1e-3, 0.5e-3, 2e-3), Interval(5e-3, -1e-3, 6e-3), "-"),
        (Interval(1e-3, 0.5e-3, 2e-3), None, "-"),
    ],
)
def test_ratios_claim_no_more_than_the_samples_show(ours, theirs, says):
    assert overhead_cells("paceline", ours, theirs)[-1] == says


def test_torch_has_no_ratio_to_itself():
    some = Interval(1e-3, 0.5e-3, 2e-3)
    assert overhead_cells("torch", some, some)[-1] == "-"
