"""The arithmetic of the bench."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.rounds import (
    interval,
    iterations_for,
    overhead,
    ratio,
    slowest_by_round,
    slowest_median,
)

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
