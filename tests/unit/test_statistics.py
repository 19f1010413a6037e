"""The statistics of a model's steps: the slow rank, norms, infinities, times of waiting."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import _core
from paceline.reducer.backward.statistics import BackwardStatistics, Statistics
from paceline.reducer.reducer_interface import Outcome

NOTHING = Statistics(0, 1, 0, "nothing", "world", 0.0, (0.0,), (), (), (), 0, 0, {}, 0)


@pytest.mark.parametrize(
    ("worked_s", "slow"),
    [
        ((), None),
        ((1.0,), None),
        ((1.0, 1.04), None),
        ((1.0, 1.06), 1),
        ((3.0, 1.0, 1.0), 0),
        ((1.0, 1.2, 1.2, 1.2), None),  # a fast rank is not the problem
        ((0.0, 0.0), None),
    ],
)
def test_a_rank_is_slow_if_the_others_wait_for_it(worked_s, slow):
    assert replace(NOTHING, worked_s=worked_s).slow_rank == slow


MS = 1_000_000  # nanoseconds


class Ranks:
    """The reports of some ranks, as rank 0 sees them."""

    def __init__(self, world_size: int) -> None:
        self.of_rank = [_core.BackwardReports(world_size) for _ in range(world_size)]
        self.seen = self.of_rank[0]

    def end_backward(self, *now_ns: int, **counts: int) -> None:
        for reports, now in zip(self.of_rank, now_ns, strict=True):
            reports.end_backward(now)
        self.read(*(reports.pack(_core.BackwardStatus(1), 1.0, **counts) for reports in self.of_rank))

    def read(self, *rows: bytes) -> None:
        for reports in self.of_rank:
            reports.read(list(rows))

    def end_averaging(self, now_ns: int, waited_ns: int) -> int:
        for reports in self.of_rank[1:]:
            reports.end_averaging(now_ns, 0)
        return self.seen.end_averaging(now_ns, waited_ns)


def times(**sums: Any) -> _core.BackwardTimes:
    """The times of the ranks: one for each element of `worked_ns`."""
    made = _core.BackwardTimes(len(sums["worked_ns"]))
    for name, value in sums.items():
        setattr(made, name, value)
    return made


def sums(of: _core.BackwardTimes) -> tuple[int, list[int], list[int], list[int]]:
    return of.backwards, of.worked_ns, of.times_last, of.held_up_ns


def test_the_wait_for_a_slow_rank_is_distinguished_from_that_for_the_network():
    ranks = Ranks(2)
    ranks.end_backward(1000 * MS, 1000 * MS)
    assert ranks.end_averaging(2000 * MS, 1000 * MS) == -1  # there was no backward before
    assert ranks.seen.times.recent_ns == [[], []]
    ranks.end_backward(2003 * MS, 2010 * MS)
    assert ranks.end_averaging(2011 * MS, 8 * MS) == 1
    assert ranks.seen.times.waited_for_ns == [0, 7 * MS]
    assert ranks.seen.times.recent_ns == [[3 * MS], [10 * MS]]
    ranks.end_backward(2021 * MS, 2020 * MS)
    assert ranks.end_averaging(2022 * MS, 1 * MS) == 0  # this rank is the last: the rest is the network
    assert ranks.seen.times.waited_for_ns == [0, 7 * MS]
    assert sums(ranks.seen.times) == (2, [13 * MS, 19 * MS], [1, 1], [1 * MS, 7 * MS])


def test_how_late_the_last_rank_is_counts_against_the_mean_of_the_others():
    ranks = Ranks(3)
    ranks.end_backward(0, 0, 0)
    ranks.end_averaging(1000 * MS, 0)
    ranks.end_backward(1001 * MS, 1005 * MS, 1009 * MS)
    ranks.end_averaging(1011 * MS, 10 * MS)
    assert sums(ranks.seen.times) == (1, [1 * MS, 5 * MS, 9 * MS], [0, 0, 1], [0, 0, 6 * MS])
    earlier = times(backwards=1, worked_ns=[1, 2, 3], times_last=[1, 0, 0], held_up_ns=[7, 0, 0])
    ranks.seen.times.add(earlier)
    assert sums(ranks.seen.times) == (
        2,
        [1_000_001, 5_000_002, 9_000_003],
        [1, 0, 1],
        [7, 0, 6_000_000],
    )


def test_the_last_times_of_a_rank_that_was_stopped_for_days_are_kept_within_bounds():
    ranks = Ranks(1)
    ranks.end_backward(0)
    ranks.end_averaging(1000 * MS, 0)
    for _ in range(100):
        ranks.end_backward(10**15)
        ranks.end_averaging(1000 * MS, 0)
    assert ranks.seen.times.recent_ns == [[(2**32 - 1) * 1000] * 64]


def test_reports_show_what_the_ranks_have_found():
    ranks = Ranks(2)
    plain = _core.BackwardReports(2).pack(_core.BackwardStatus(1), 1.0, note=7)
    ranks.read(plain, plain)
    assert (ranks.seen.outcome, ranks.seen.counts_any, ranks.seen.refuses_unused) == (0, False, False)
    assert not ranks.seen.take_new_weights()
    other = _core.BackwardReports(2).pack(
        _core.BackwardStatus(1), 3.0, 8, 2, True, nonfinite=4, overflowed=5, identity=6
    )
    ranks.read(plain, other)
    assert Outcome(ranks.seen.outcome) == Outcome.UNUSED | Outcome.NOTES_DIFFER
    assert ranks.seen.counts_any and ranks.seen.counts_nonfinite and ranks.seen.refuses_unused
    assert (ranks.seen.weights, ranks.seen.largest_weight) == ([1.0, 3.0], 3.0)
    assert ranks.seen.take_new_weights() and not ranks.seen.take_new_weights()
    assert (ranks.seen.result([[], [1, 3]], 4).notes, ranks.seen.unused) == ([7, 8], [0, 2])
    assert (ranks.seen.unknown_peers(0), ranks.seen.unknown_peers(6)) == ([1], [0])


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ([{}, {}], Outcome.GOOD),
        ([{"forwards": 1}, {"forwards": 2}], Outcome.SKIPPED),
        ([{"interrupted": True}, {}], Outcome.SKIPPED | Outcome.REPORTED),
        ([{"interrupted": True}, {"interrupted": True}], Outcome.SKIPPED | Outcome.REPORTED),
        ([{"finished": True}, {"forwards": 1}], Outcome.FINISHED),
        ([{"finished": True}, {"finished": True}], Outcome.FINISHED),
        ([{"refused": 1, "forwards": 1}, {"forwards": 1}], Outcome.SKIPPED | Outcome.REPORTED),
        ([{"forwards": 1, "wrote_buffers": True}, {"forwards": 1}], Outcome.REPORTED),
    ],
)
def test_the_statuses_of_all_ranks_make_the_outcome(statuses, outcome):
    ranks = Ranks(2)
    words = [_core.BackwardStatus(**each) for each in statuses]
    ranks.read(*(_core.BackwardReports(2).pack(each, 1.0) for each in words))
    assert Outcome(ranks.seen.outcome) == outcome
    assert ranks.seen.result([[], []], 4).statuses == [
        _core.BackwardStatus.unpack(each.pack()) for each in words
    ]


def test_what_is_no_report_is_refused():
    with pytest.raises(RuntimeError, match="no report"):
        _core.BackwardReports(1).read([b"short"])


def result(nonfinite: int, globally_unused: list[int]) -> Any:
    """A backward in which rank 1 did not use parameter 0, and its gradient of another one was not finite."""
    return SimpleNamespace(nonfinite=[(1, nonfinite)], globally_unused=globally_unused, unused=[[], [0]])


class Model:
    """A model of two dense parameters and a sparse one, on rank 1 of 2."""

    def __init__(self, path: str = "memory") -> None:
        self.norm, self.unused = 9.0, []
        self.are_unchanged = True
        self.reducer = SimpleNamespace(
            times=times(
                waited_ns=2_000_000_000,
                waited_for_ns=[2_000_000_000, 0],
                backwards=3,
                worked_ns=[0, 0],
                times_last=[3, 0],
                held_up_ns=[6_000_000_000, 0],
                recent_ns=[[10**9, 3 * 10**9, 2 * 10**9], []],
            ),
            squared_norm=lambda: self.norm,
        )
        self.sparse = SimpleNamespace(squared_norm=16.0, nonfinite=[(1, 2), (0, 2)])
        buckets = [SimpleNamespace(nbytes=64), SimpleNamespace(nbytes=128)]
        self.names = ["w", "b"]
        self.plan = SimpleNamespace(buckets=buckets)
        self.communicator: Any = SimpleNamespace(rank=1, world_size=2, path=path, bits="world")

    def statistics(self, *, asks_for_nonfinite: bool = True) -> BackwardStatistics:
        gradients = SimpleNamespace(fingerprint=list, memory=lambda: None)
        tensors = SimpleNamespace(names=self.names, all_names=[*self.names, "embed"])
        front_end: Any = SimpleNamespace(gradients=gradients, tensors=tensors, sparse=self.sparse)
        statistics = BackwardStatistics(front_end, self.communicator, asks_for_nonfinite=asks_for_nonfinite)
        statistics.fresh.are_unchanged = lambda: self.are_unchanged  # type: ignore[method-assign]
        self.use(statistics, self.reducer)
        statistics.result = result(1, self.unused)
        return statistics

    def use(self, statistics: BackwardStatistics, reducer: Any) -> None:
        """A plan with this reducer comes into use."""
        reduction: Any = SimpleNamespace(plan=self.plan, reducer=reducer)
        statistics.use(self.communicator, reduction)


def test_the_norm_is_that_of_all_gradients():
    assert Model().statistics().squared_norm() == 25.0


def test_infinities_have_the_names_of_all_parameters():
    assert Model().statistics().nonfinite() == {0: ("embed",), 1: ("b", "embed")}


def test_a_norm_is_known_as_long_as_the_gradients_are_its_own():
    model = Model()
    assert model.statistics().known_norm() == 5.0
    model.are_unchanged = False
    assert model.statistics().known_norm() is None


def test_of_a_void_backward_no_norm_is_known():
    model = Model()
    model.norm = math.nan
    assert model.statistics().known_norm() is None


def test_globally_unused_parameters_may_have_gradients_that_count():
    model = Model()
    model.unused = [1]
    assert model.statistics().known_norm() is None


@pytest.mark.parametrize(
    ("path", "asks", "looks"),
    [("memory", False, True), ("hosts", False, True), ("group", False, False), ("group", True, True)],
)
def test_infinities_are_known_where_a_check_runs(path, asks, looks):
    statistics = Model(path).statistics(asks_for_nonfinite=asks)
    assert statistics.looks_for_nonfinite == looks
    assert bool(statistics.now(3).nonfinite) == looks


def test_the_statistics_are_of_all_reducers():
    model = Model()
    known = model.statistics()
    known.take_over()
    model.use(known, reducer(0))
    statistics = known.now(6)
    assert (statistics.rank, statistics.world_size, statistics.passes) == (1, 2, 6)
    assert (statistics.waited_s, statistics.waited_for_s) == (2.0, (2.0, 0.0))
    assert (statistics.times_last, statistics.held_up_s) == ((3, 0), (6.0, 0.0))
    assert statistics.worked_s == ()  # of the reducer in use, which has made none
    assert (statistics.num_buckets, statistics.pass_bytes, statistics.num_unused) == (2, 192, 1)


def test_before_the_first_good_backward_nothing_is_unused():
    assert Model().statistics().now(0).num_unused == 0


def reducer(scale: int) -> SimpleNamespace:
    """One of two ranks whose figures are multiples of a number."""
    return SimpleNamespace(
        times=times(
            waited_ns=10**9 * scale,
            waited_for_ns=[0, 10 * scale],
            backwards=scale,
            worked_ns=[1 * scale, 2 * scale],
            times_last=[0, scale],
            held_up_ns=[0, 5 * scale],
        ),
        squared_norm=lambda: 4.0 * scale,
    )


def after(*scales: int) -> BackwardStatistics:
    """The statistics after plans with these reducers; the last one is in use."""
    model = Model()
    model.names = [f"p{index}" for index in range(101)]
    model.sparse = SimpleNamespace(squared_norm=0.0, nonfinite=[])
    model.reducer = reducer(0)
    statistics = model.statistics()
    for number, scale in enumerate(scales):
        if number:
            statistics.take_over()
        model.use(statistics, reducer(scale))
        if not number:
            statistics.result = result(scale, [])
    return statistics


def test_without_a_change_of_the_plan_all_is_what_the_reducer_says():
    statistics = after(3)
    assert (statistics.waited_s, sums(statistics.times())) == (3.0, (3, [3, 6], [0, 3], [0, 15]))
    assert (statistics.squared_norm(), statistics.nonfinite()) == (12.0, {1: ("p3",)})


def test_what_adds_up_is_added_up():
    statistics = after(1, 10, 100)
    assert (statistics.waited_s, sums(statistics.times())) == (111.0, (111, [111, 222], [0, 111], [0, 555]))
    assert statistics.now(0).waited_for_s == (0.0, 1110e-9)


def test_the_last_backward_counts_until_the_next_one_ends():
    statistics = after(1, 100)
    assert (statistics.squared_norm(), statistics.nonfinite()) == (4.0, {1: ("p1",)})
    statistics.result, statistics.earlier_norm = result(100, []), None
    assert (statistics.squared_norm(), statistics.nonfinite()) == (400.0, {1: ("p100",)})
