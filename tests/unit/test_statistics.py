"""How long ranks work, and which of them is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline import _core
from paceline.reducer.protocol import Outcome
from paceline.reducer.statistics import Statistics
from paceline.reducer.worked_times import Arrivals

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


def test_the_wait_for_a_slow_rank_is_told_from_that_for_the_network():
    ranks = Ranks(2)
    ranks.end_backward(1000 * MS, 1000 * MS)
    assert ranks.end_averaging(2000 * MS, 1000 * MS) == -1  # there was no backward before
    assert ranks.seen.worked_ns == [[], []]
    ranks.end_backward(2003 * MS, 2010 * MS)
    assert ranks.end_averaging(2011 * MS, 8 * MS) == 1
    assert ranks.seen.waited_for_ns == [0, 7 * MS]
    assert ranks.seen.worked_ns == [[3 * MS], [10 * MS]]
    ranks.end_backward(2021 * MS, 2020 * MS)
    assert ranks.end_averaging(2022 * MS, 1 * MS) == 0  # this rank is the last: the rest is the network
    assert ranks.seen.waited_for_ns == [0, 7 * MS]
    assert ranks.seen.arrivals == (2, [13 * MS, 19 * MS], [1, 1], [1 * MS, 7 * MS])


def test_how_late_the_last_rank_is_counts_against_the_mean_of_the_others():
    ranks = Ranks(3)
    ranks.end_backward(0, 0, 0)
    ranks.end_averaging(1000 * MS, 0)
    ranks.end_backward(1001 * MS, 1005 * MS, 1009 * MS)
    ranks.end_averaging(1011 * MS, 10 * MS)
    assert ranks.seen.arrivals == (1, [1 * MS, 5 * MS, 9 * MS], [0, 0, 1], [0, 0, 6 * MS])
    both = Arrivals.none(3).plus(ranks.seen.arrivals).plus((1, (1, 2, 3), (1, 0, 0), (7, 0, 0)))
    assert both == (2, [1_000_001, 5_000_002, 9_000_003], [1, 0, 1], [7, 0, 6_000_000])


def test_the_last_times_of_a_rank_that_was_stopped_for_days_are_kept_within_bounds():
    ranks = Ranks(1)
    ranks.end_backward(0)
    ranks.end_averaging(1000 * MS, 0)
    for _ in range(100):
        ranks.end_backward(10**15)
        ranks.end_averaging(1000 * MS, 0)
    assert ranks.seen.worked_ns == [[(2**32 - 1) * 1000] * 64]


def test_reports_tell_what_the_ranks_have_found():
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
    assert (ranks.seen.notes, ranks.seen.unused) == ([7, 8], [0, 2])
    assert (ranks.seen.unknown_peers(0), ranks.seen.unknown_peers(6)) == ([1], [0])


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ([{}, {}], Outcome.GOOD),
        ([{"forwards": 1}, {"forwards": 2}], Outcome.SKIPPED),
        ([{"interrupted": True}, {}], Outcome.SKIPPED | Outcome.TOLD),
        ([{"interrupted": True}, {"interrupted": True}], Outcome.SKIPPED | Outcome.TOLD),
        ([{"finished": True}, {"forwards": 1}], Outcome.FINISHED),
        ([{"finished": True}, {"finished": True}], Outcome.FINISHED),
        ([{"refused": 1, "forwards": 1}, {"forwards": 1}], Outcome.SKIPPED | Outcome.TOLD),
        ([{"forwards": 1, "wrote_buffers": True}, {"forwards": 1}], Outcome.TOLD),
    ],
)
def test_the_statuses_of_all_ranks_make_the_outcome(statuses, outcome):
    ranks = Ranks(2)
    told = [_core.BackwardStatus(**each) for each in statuses]
    ranks.read(*(_core.BackwardReports(2).pack(each, 1.0) for each in told))
    assert Outcome(ranks.seen.outcome) == outcome
    assert ranks.seen.statuses == [_core.BackwardStatus.unpack(each.pack()) for each in told]


def test_what_is_no_report_is_refused():
    with pytest.raises(RuntimeError, match="no report"):
        _core.BackwardReports(1).read([b"short"])
