"""Asynchronous calls: order, results, errors, and arrays that only the call still references."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import paceline
from paceline.errors import DeadlineError, MismatchError
from tests.harness import kept_ranks, ranks


@kept_ranks(3)
def test_async_calls_run_in_call_order_among_synchronous_ones(group):
    for repeat in range(20):
        arrays = [np.full(1 + 40_000 * (i % 3), group.rank + i + repeat) for i in range(6)]
        works = [group.all_reduce(array, async_op=True) for array in arrays[:3]]
        group.all_reduce(arrays[3])  # waits for the queued calls
        works += [group.all_reduce(arrays[4], "max", async_op=True)]
        works += [group.reduce(arrays[5], root=1, async_op=True)]
        gathered = group.all_gather(np.array([group.rank]))
        for work in reversed(works):
            assert work.wait() is None
            assert work.is_over
        for i, array in enumerate(arrays[:4]):
            assert_array_equal(array, 3 + 3 * (i + repeat))
        assert_array_equal(arrays[4], 2 + 4 + repeat)
        assert_array_equal(arrays[5], 3 + 3 * (5 + repeat) if group.rank == 1 else group.rank + 5 + repeat)
        assert_array_equal(gathered[:, 0], [0, 1, 2])


@kept_ranks(2)
def test_arrays_of_dropped_calls_stay_alive(group):
    """Only the call references the array, whose memory must not be reused before the call ends."""
    for repeat in range(10):
        count = 300_000
        if group.rank == 0:
            group.broadcast(np.full(count, repeat), 0, async_op=True)
        else:
            received = np.zeros(count, np.int64)
            work = group.broadcast(received, 0, async_op=True)
        churn = [np.full(count, -1) for _ in range(3)]
        group.all_reduce(np.full(count, 5), async_op=True)
        more = [np.full(count, -1) for _ in range(3)]
        group.barrier()
        assert all((each == -1).all() for each in (*churn, *more))
        if group.rank == 1:
            work.wait()
            assert_array_equal(received, repeat)


@kept_ranks(2)
def test_a_timeout_of_wait_does_not_end_the_call(group):
    total = np.full(4, group.rank + 1)
    if group.rank == 0:
        work = group.all_reduce(total, async_op=True)
        with pytest.raises(DeadlineError, match=r"not done after 0\.0 s"):
            work.wait(0.01)
        assert not work.is_over
        group.send(np.zeros(1), 1)  # lets the other rank join the call
        work.wait(60)
    else:
        group.recv(np.zeros(1), 0)
        group.all_reduce(total)
    assert_array_equal(total, 3)


@kept_ranks(2)
def test_errors_are_raised_in_wait(group):
    works = [group.all_reduce(np.zeros(3 + i * group.rank), async_op=True) for i in range(3)]
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(MismatchError):
            work.wait()
    total = np.ones(3)
    group.all_reduce(total)
    assert_array_equal(total, 2)


@kept_ranks(2)
def test_calls_of_several_threads_take_turns(group):
    """Each thread reduces in its own subgroup of the same two processes."""
    others = [group.subgroup([0, 1]) for _ in range(3)]
    failures = []

    def work(mine, seed):
        try:
            for i in range(200):
                array = np.full(1 + (i * seed) % 5000, group.rank + i)
                mine.all_reduce(array)
                assert_array_equal(array, 1 + 2 * i)
        except BaseException as error:  # an assertion in a thread would be lost
            failures.append(error)

    threads = [threading.Thread(target=work, args=(each, 7 + i)) for i, each in enumerate(others)]
    for thread in threads:
        thread.start()
    work(group, 3)
    for thread in threads:
        thread.join()
    assert not failures
    for each in others:
        each.close()


@ranks(2)
def test_close_runs_queued_calls(group):
    inner = group.subgroup([0, 1])
    arrays = [np.full(100_000, group.rank + 1) for _ in range(5)]
    works = [inner.all_reduce(array, async_op=True) for array in arrays]
    inner.close()
    assert all(work.is_over for work in works)
    for array in arrays:
        assert_array_equal(array, 3)
    with pytest.raises(paceline.errors.GroupClosedError):
        inner.all_reduce(arrays[0], async_op=True).wait()
