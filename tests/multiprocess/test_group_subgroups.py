"""Subgroups: rank order, overlap, nesting, messages, and missing ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline.errors import CollectiveError, DeadlineError
from tests.harness import kept_ranks


@kept_ranks(4)
def test_order_overlap_and_nesting(group):
    rank = group.rank
    evens, odds = group.subgroup([0, 2]), group.subgroup([3, 1])
    overlapping = group.subgroup([1, 2, 3])
    whole = group.subgroup([3, 2, 1, 0])
    mine = evens or odds
    assert (evens is None) == (rank % 2 == 1) and (odds is None) == (rank % 2 == 0)
    assert mine.rank == ([0, 2] if evens else [3, 1]).index(rank)
    assert whole.rank == 3 - rank
    assert {group.name, mine.name, whole.name} == {"world", mine.name, "world/4"}
    nested = overlapping.subgroup([2, 0]) if overlapping else None  # ranks 3 and 1 of `group`
    for repeat in range(30):
        value = rank + repeat
        for each, members in ((mine, [0, 2] if evens else [3, 1]), (whole, range(4))):
            array = np.full(1 + repeat * 3000, value)
            each.all_reduce(array)
            assert_array_equal(array, sum(member + repeat for member in members))
        if overlapping:
            assert_array_equal(overlapping.all_gather(np.array([rank]))[:, 0], [1, 2, 3])
        if nested:
            assert_array_equal(nested.all_gather(np.array([rank]))[:, 0], [3, 1])
        group.barrier()


@kept_ranks(3)
def test_closing_a_subgroup_does_not_affect_other_ranks(group):
    for repeat in range(5):
        inner = group.subgroup([0, 2])
        if inner:
            with inner:
                array = inner.allocate(1000)
                array[:] = repeat
                inner.all_reduce(array)
                assert_array_equal(array, 2 * repeat)
        total = np.ones(3)
        group.all_reduce(total)
        assert_array_equal(total, 3)


@kept_ranks(2)
def test_messages_of_a_group_and_its_subgroup_do_not_mix(group):
    inner = group.subgroup([1, 0])
    other = 1 - group.rank
    works = [
        group.send(np.array([1]), other, async_op=True),
        inner.send(np.array([2]), group.rank, async_op=True),
    ]
    got = np.zeros(1, np.int64)
    inner.recv(got, group.rank)
    assert got[0] == 2
    group.recv(got, other)
    assert got[0] == 1
    for work in works:
        work.wait()


@pytest.mark.parametrize("late", [0, 1, 3])
@kept_ranks(4)
def test_a_rank_missing_from_a_subgroup_is_named_by_all(group, late):
    """Ranks with a shorter timeout name it, too."""
    group.barrier()
    if group.rank == late:
        with pytest.raises(CollectiveError):
            while True:
                group._core.check_usable()
                time.sleep(0.01)
        return
    with pytest.raises(DeadlineError) as caught:
        group.subgroup([0, 1, 2, 3], timeout_s=1.0 if group.rank >= 2 else 8.0)
    assert caught.value.late == (late,)
