"""The judge of generated programs, on hand-written records, in this process only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.differential.judge import EQUAL, REFUSED, USER_ERROR, judge, raised_everywhere
from tests.differential.records import Event, Record, Value

_END = "end of data"
_ERROR = "its own error"
_HALF = "an error in a backward of two models, after the mean of the first"
_BROKEN = "an error in a backward before any mean"
_DEATH = "an error of the program's own that ends it"
_LOST = "a rank was lost in a backward, before any mean"


def _verdict(*ranks):
    """The means by rank: a number for each backward that returned one."""
    return judge([_record(list(means)) for means in ranks], None, tolerance=1e-3)


def _record(means):
    raised = _event(means.pop()) if means[-1] in (_LOST, _DEATH) else None
    return Record([_event(each) for each in means], raised)


def _event(outcome):
    if outcome == _END:
        return Event("loop", "finished")
    if outcome in (_ERROR, _DEATH):
        return Event("forward", "error", by_user=True)
    if outcome == _LOST:
        return Event("backward", "error", error="PeerLostError")
    if outcome in (_BROKEN, _HALF):
        return Event("backward", "error", error="DeadlineError", made=[0] if outcome == _HALF else [])
    mean = np.full(3, outcome, np.float32)
    return Event("backward", "gradients", {"weight": Value.of(mean)}, shared=True)


def test_a_rank_without_data_sees_no_backwards_of_the_others():
    assert _verdict([1, _END, 4], [1, 2, 3, _END, 4]).kind == EQUAL


def test_ranks_with_data_are_compared_while_another_one_has_none():
    assert _verdict([1, _END, 4], [1, 2, _END, 4], [1, 2, _END, 4]).kind == EQUAL
    assert _verdict([1, _END, 4], [1, 2, _END, 4], [1, 9, _END, 4]).kind == "ranks differ"


def test_a_rank_may_end_its_data_before_the_backward_that_it_has_left():
    assert _verdict([1, _ERROR, _END, 5], [1, 4, _END, 5]).kind == USER_ERROR
    assert _verdict([1, _ERROR, 3, _END, 5], [1, 3, 4, _END, 5]).kind == USER_ERROR  # a step apart


@pytest.mark.parametrize(("first", "second"), [(5, 6), (4, 5)])
def test_ranks_that_differ_after_all_data_has_ended(first, second):
    assert _verdict([1, _ERROR, _END, first], [1, 4, _END, second]).kind == "ranks differ"


def test_a_mean_that_one_rank_alone_has():
    assert _verdict([1, 2], [1]).kind == "a rank went on alone"
    assert _verdict([1, _END, 2], [1, _END]).kind == "a rank went on alone"


def test_a_rank_that_dies_after_a_mean_may_be_gone_before_the_others_have_it():
    assert _verdict([1, 2, _DEATH], [1, _LOST]).kind == REFUSED
    assert _verdict([1, 2, _DEATH], [1, _BROKEN]).kind == "a rank went on alone"
    assert _verdict([1, 2], [1, _LOST]).kind == "a rank went on alone"
    assert _verdict([1, 2, 3, _DEATH], [1, _LOST]).kind == "a rank went on alone"


def test_a_rank_that_left_before_the_data_of_another_one_had_ended():
    assert _verdict([1, _END, 2], [1, _END, 2], [1, 3]).kind == "a rank went on alone"


def test_a_mean_that_came_before_the_error_of_its_backward_counts():
    assert _verdict([_ERROR, _HALF], [3, _BROKEN]).kind == REFUSED
    assert _verdict([_ERROR, _BROKEN], [3, _BROKEN]).kind == "a rank went on alone"
    assert _verdict([_HALF, 4], [3, 5]).kind == "ranks differ"  # it still has its place in the sequence


@pytest.mark.parametrize(("reported", "kind"), [(1.007, EQUAL), (1.009, "wrong norm"), (0.991, "wrong norm")])
def test_a_norm_may_be_as_wrong_as_its_type_makes_it(reported, kind):
    event = Event("clip", "norm", reported=reported, true=1.0, within=2**-7 + 2e-4)
    assert judge([Record([event])], None, tolerance=0.1).kind == kind


@pytest.mark.parametrize(("mean", "kind"), [(1e30, "wrong mean"), (4e40, EQUAL)])
def test_what_float32_cannot_hold_is_not_compared(mean, kind):
    ranks = [_record([1, np.inf, np.nan]) for _ in range(2)]
    values = [{"weight": Value.of(np.full(3, each))} for each in (1.0, mean, mean)]
    wanted = [Event("backward", "gradients", each, shared=True) for each in values]
    expected = [Record(wanted, None) for _ in ranks]
    assert judge(ranks, expected, tolerance=1e-3).kind == kind


@pytest.mark.parametrize(
    ("off", "tolerance", "kind"),
    [(0.005, 0.1, EQUAL), (0.05, 0.1, "wrong local gradient"), (0.005, 3e-3, "wrong local gradient")],
)
def test_a_small_gradient_is_as_exact_as_the_largest_of_its_type(off, tolerance, kind):
    def record(small):
        values = {"small": small, "large": 1.0}
        of = {name: Value.of(np.full(3, each, np.float32)) for name, each in values.items()}
        return Record([Event("backward", "gradients", of, shared=False)])

    assert judge([record(0.04 + off)], [record(0.04)], tolerance=tolerance).kind == kind


def test_an_error_that_all_ranks_caught_stands_whatever_single_ranks_catch_later():
    """The reference raises at the first, which it could not know, and is not compared from the second on."""
    here = Event("1.2", "error", error="SkippedPassError")
    own = Event("1.2", "error", by_user=True)
    alone, lost = Event("6.1", "error", by_user=True), Event("6.2", "error", error="PeerLostError")
    mean, other = (
        Event("4.1 model 0", "gradients", {"weight": Value.of(np.full(3, value, np.float32))}, shared=True)
        for value in (2, 3)
    )
    records = [Record([here, mean, alone]), Record([own, mean, lost])]
    assert raised_everywhere(records) == {"1.2": False}
    assert judge(records, [Record([here, mean, alone])] * 2, tolerance=1e-3).kind == REFUSED
    assert judge(records, [Record([here, other, alone])] * 2, tolerance=1e-3).kind == "wrong mean"
    assert raised_everywhere([Record([here, lost]), Record([alone])]) == {}


def test_nothing_is_compared_from_the_op_on_in_which_ranks_raised_differently():
    means = [
        Event(f"{op} model 0", "gradients", {"weight": Value.of(np.full(3, 2, np.float32))}, shared=True)
        for op in (4, 7)
    ]
    alone, lost = Event("6.1", "error", by_user=True), Event("6.2", "error", error="PeerLostError")
    wrong = replace(means[1], values={"weight": Value.of(np.full(3, 9, np.float32))})
    records = [Record([means[0], alone, means[1]]), Record([means[0], lost, means[1]])]
    expected = [Record([means[0], alone, wrong]), Record([means[0], lost, wrong])]
    assert judge(records, expected, tolerance=1e-3).kind == REFUSED
