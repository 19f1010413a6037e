"""How long ranks work, and which of them is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.reducer.pass_reports import REPORT_BYTES, RankReport
from paceline.reducer.statistics import Statistics
from paceline.reducer.worked_times import Arrivals, WorkedTimes

NOTHING = Statistics(0, 1, 0, "nothing", "world", 0.0, (0.0,), (), (), (), 0, 0, {}, 0)


@pytest.mark.parametrize(
    ("worked_s", "slow"),
    [
        ((), None),
        ((1.0,), None),
        ((1.0, 1.04), None),
        ((1.0, 1.06), 1),
        ((3.0, 1.0, 1.0), 0),
        ((1.0, 1.2, 1.2, 1.2), None),  # who is fast is not the problem
        ((0.0, 0.0), None),
    ],
)
def test_a_rank_is_slow_if_the_others_wait_for_it(worked_s, slow):
    assert replace(NOTHING, worked_s=worked_s).slow_rank == slow


def test_the_wait_for_a_slow_rank_is_told_from_that_for_the_network():
    times = WorkedTimes(2)
    times.end_backward(1.0)
    assert times.own_us == 0  # there was no pass before
    times.end_pass(2.0, 1.0, [0, 0])
    assert times.by_rank() == [[], []]
    times.end_backward(2.003)
    assert times.own_us == 3000
    times.end_pass(2.011, 0.008, [3000, 10_000])
    assert times.waited_for_ns == [0, 7_000_000]
    assert times.by_rank() == [[3_000_000], [10_000_000]]
    times.end_backward(2.021)
    times.end_pass(2.022, 0.001, [10_000, 9000])  # this rank is the last: the rest is the network
    assert times.waited_for_ns == [0, 7_000_000]
    assert times.arrivals == (2, [13_000_000, 19_000_000], [1, 1], [1_000_000, 7_000_000])


def test_how_late_the_last_rank_is_counts_against_the_mean_of_the_others():
    times = WorkedTimes(3)
    times.end_pass(1.0, 0.0, [0, 0, 0])
    times.end_backward(1.001)
    times.end_pass(1.011, 0.01, [1000, 5000, 9000])
    assert times.arrivals == (1, [1_000_000, 5_000_000, 9_000_000], [0, 0, 1], [0, 0, 6_000_000])
    both = Arrivals.none(3).plus(times.arrivals).plus((1, (1, 2, 3), (1, 0, 0), (7, 0, 0)))
    assert both == (2, [1_000_001, 5_000_002, 9_000_003], [1, 0, 1], [7, 0, 6_000_000])


def test_times_travel_with_the_report():
    report = RankReport(1.0, 2, 3, 4, 5, 6, 7, True, 8)
    assert RankReport.unpack(report.pack()) == report
    assert len(report.pack()) == REPORT_BYTES
    hours = report._replace(worked_us=10**12)  # a rank that was stopped for days
    assert RankReport.unpack(hours.pack()).worked_us == 2**32 - 1
