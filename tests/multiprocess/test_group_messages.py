"""send and recv: sizes, order, both directions at once, tags, and messages that do not match."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline.errors import ConfigError, MismatchError
from tests.harness import kept_ranks

_RING_BYTES = 128 * 1024  # size of the sender's outbox (cpp/core/region_layout.h)


@kept_ranks(2)
def test_sizes_around_the_ring(group):
    other = 1 - group.rank
    header = 16
    for nbytes in (0, 1, _RING_BYTES - header - 1, _RING_BYTES - header, _RING_BYTES, 3 * _RING_BYTES + 11):
        for sender in (0, 1):
            array = np.full(nbytes, 7 + sender, np.uint8)
            if group.rank == sender:
                assert group.send(array, other, tag=nbytes) is None
            else:
                received = np.zeros(nbytes, np.uint8)
                assert group.recv(received, other, tag=nbytes) is None
                assert_array_equal(received, array)


@kept_ranks(3)
def test_big_messages_in_all_directions_at_once(group):
    others = [rank for rank in range(3) if rank != group.rank]
    for repeat in range(3):
        out = np.full(300_000, 10 * repeat + group.rank, np.int64)
        received = {other: np.zeros(300_000, np.int64) for other in others}
        works = [group.send(out, other, async_op=True) for other in others]
        works += [group.recv(received[other], other, async_op=True) for other in others]
        for work in reversed(works):
            work.wait()
            assert work.is_over
        for other in others:
            assert_array_equal(received[other], np.full(300_000, 10 * repeat + other))


@kept_ranks(2)
def test_messages_keep_their_order(group):
    if group.rank == 0:
        for i in range(500):
            group.send(np.full(i % 40, i), 1, tag=i)
    else:
        for i in range(500):
            array = np.zeros(i % 40, np.int64)
            group.recv(array, 0, tag=i)
            assert_array_equal(array, np.full(i % 40, i))


@kept_ranks(2)
def test_a_message_that_does_not_fit_is_dropped(group):
    """The receiver raises and names what it received. The sender and later messages are not affected."""
    for nbytes in (100, 5 * _RING_BYTES):
        if group.rank == 0:
            works = [group.send(np.full(nbytes, 1, np.uint8), 1, tag=3, async_op=True)]
            works += [group.send(np.full(nbytes, 2, np.uint8), 1, tag=4, async_op=True)]
            works += [group.send(np.full(10, 3, np.uint8), 1, async_op=True)]
            for work in works:
                work.wait()
        else:
            array = np.zeros(nbytes - 1, np.uint8)
            with pytest.raises(MismatchError, match=rf"(?s)rank 0.*{nbytes - 1} bytes.*{nbytes} bytes"):
                group.recv(array, 0, tag=3)
            assert_array_equal(array, 0)
            with pytest.raises(MismatchError, match=r"(?s)tag 9.*tag 4"):
                group.recv(np.zeros(nbytes, np.uint8), 0, tag=9)
            array = np.zeros(10, np.uint8)
            group.recv(array, 0)
            assert_array_equal(array, 3)
        group.barrier()


@kept_ranks(2)
def test_messages_progress_while_collectives_run(group):
    """A message in flight progresses during barriers and collectives, on either side."""
    big = 4 * _RING_BYTES
    if group.rank == 0:
        sent = group.send(np.arange(big), 1, async_op=True)
        group.barrier()
        group.all_reduce(np.ones(3))
        sent.wait()
    else:
        group.barrier()
        received = np.zeros(big, np.int64)
        work = group.recv(received, 0, async_op=True)
        group.all_reduce(np.ones(3))
        work.wait()
        assert_array_equal(received, np.arange(big))
    group.barrier()


@kept_ranks(2)
def test_arrays_of_unfinished_messages_stay_alive(group):
    """The Work is dropped at once. The message must neither change nor write to freed memory."""
    count = 4 * _RING_BYTES
    other = 1 - group.rank
    for repeat in range(5):
        group.send(np.full(count, repeat, np.uint8), other, async_op=True)
        churn = [np.zeros(count, np.uint8) for _ in range(4)]  # would reuse the memory of a dropped array
        received = np.zeros(count, np.uint8)
        group.recv(received, other)
        assert_array_equal(received, repeat)
        assert not np.any(churn)
        group.recv(np.empty(count, np.uint8), other, async_op=True)
        churn = [np.zeros(count, np.uint8) for _ in range(4)]
        group.send(np.full(count, 255, np.uint8), other)
        group.barrier()
        assert not np.any(churn)


@kept_ranks(2)
def test_a_collective_of_another_thread_does_not_hold_up_a_message(group):
    """Rank 0 is in an all_reduce that rank 1 joins only after its message has been received."""
    total = np.full(10, group.rank + 1)
    if group.rank == 0:
        work = group.all_reduce(total, async_op=True)
        received = np.zeros(4 * _RING_BYTES, np.uint8)
        group.recv(received, 1)
        assert_array_equal(received, 9)
        work.wait()
    else:
        group.send(np.full(4 * _RING_BYTES, 9, np.uint8), 0)
        group.all_reduce(total)
    assert_array_equal(total, 3)


@kept_ranks(2)
def test_arguments_are_checked(group):
    array = np.zeros(3)
    for call in (group.send, group.recv):
        with pytest.raises(ConfigError, match="another rank than this one"):
            call(array, group.rank)
        for wrong in (-1, 2):
            with pytest.raises(ConfigError, match="0 to 1"):
                call(array, wrong)
        with pytest.raises(ConfigError, match="C-contiguous"):
            call(np.zeros((4, 4))[:, 1], 1 - group.rank)
    array.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        group.recv(array, 1 - group.rank)
    with pytest.raises(ConfigError, match="tag"):
        group.send(array, 1 - group.rank, tag=-1)
