"""Asynchronous calls, messages, deadlines and shutdown of the torch backend."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline.errors import ConfigError, DeadlineError, GroupClosedError, MismatchError, PeerLostError
from tests.harness import ranks
from tests.multiprocess.torch_groups import needs_backend, torch_group

pytestmark = needs_backend


@ranks(3, group=None)
def test_calls_in_flight_keep_their_order(rank):
    """Kinds are mixed, synchronous calls come in between, and the waits are in reverse order."""
    with torch_group(rank):
        tensors = [torch.full((1000,), float(rank + i)) for i in range(30)]
        gathered = [[torch.zeros(4) for _ in range(3)] for _ in tensors]
        works = []
        for i, tensor in enumerate(tensors):
            works.append(dist.all_reduce(tensor, async_op=True))
            works.append(dist.all_gather(gathered[i], torch.full((4,), float(rank * i)), async_op=True))
            if i % 5 == 0:
                dist.broadcast(received := torch.full((3,), float(rank)), i % 3)
                assert received.tolist() == [i % 3] * 3
        for work in reversed(works):
            work.wait()
        for i, tensor in enumerate(tensors):
            assert tensor.unique().tolist() == [3 * i + 3]
            assert [t.unique().tolist() for t in gathered[i]] == [[0], [i], [2 * i]] if i else True
        dist.barrier(async_op=True).wait()


@ranks(2, group=None)
def test_futures_deliver_results_and_errors(rank):
    with torch_group(rank):
        for is_late in (False, True):
            work = dist.all_reduce(torch.full((2,), rank + 1.0), async_op=True)
            if is_late:
                work.wait()
            doubled = work.get_future().then(lambda future: future.value()[0] * 2)
            assert doubled.wait().tolist() == [6, 6]
            assert work.is_completed() and work.is_success() and work.exception() is None
            assert work.result()[0].tolist() == [3, 3]

        work = dist.all_reduce(torch.zeros(2 + rank), async_op=True)
        with pytest.raises(RuntimeError, match="made different calls"):
            work.get_future().wait()
        with pytest.raises(MismatchError, match="float32 x 2, sum"):
            work.wait()
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), MismatchError)
        dist.barrier()  # the group still works


@ranks(2, group=None)
def test_a_wait_can_be_shorter_than_the_call(rank):
    with torch_group(rank):
        if rank == 0:
            work = dist.barrier(async_op=True)
            with pytest.raises(RuntimeError, match="not done after"):
                work.wait(timedelta(seconds=0.05))
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.zeros(1), 0)
            dist.barrier()


@ranks(3, group=None)
def test_messages(rank):
    with torch_group(rank):
        following, preceding = (rank + 1) % 3, (rank - 1) % 3
        big, got = torch.full((200_000,), float(rank)), torch.zeros(200_000)
        ring = [dist.P2POp(dist.irecv, got, preceding), dist.P2POp(dist.isend, big, following)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        assert got.unique().tolist() == [preceding]

        # All ranks send before they receive.
        works = [dist.isend(torch.full((4, 3), rank + 10.0 * i).t(), following, tag=i) for i in range(5)]
        for i in range(5):
            strided = torch.zeros(4, 3).t()
            assert dist.recv(strided, preceding, tag=i) == preceding
            assert strided.unique().tolist() == [preceding + 10.0 * i]
        for work in works:
            work.wait()
            assert work.is_completed()

        # A message passes while a collective is in flight.
        work = dist.all_reduce(total := torch.ones(3), async_op=True) if rank == 0 else None
        if rank == 1:
            dist.send(torch.tensor([5.0]), 0)
        if rank == 0:
            dist.recv(one := torch.zeros(1), 1)
            assert one.item() == 5
            work.wait()
        else:
            dist.all_reduce(total := torch.ones(3))
        assert total.tolist() == [3, 3, 3]

        if rank == 0:
            dist.send(torch.zeros(2), 1)
        if rank == 1:
            with pytest.raises(MismatchError, match=r"expected 12 bytes .* got 8 bytes"):
                dist.recv(torch.zeros(3), 0)


@ranks(4, group=None)
def test_messages_from_any_source(rank):
    """Each sender's messages arrive in order, also if they are longer than a channel."""
    with torch_group(rank):
        for count in (3, 100_000):
            if rank == 0:
                sources = []
                for _ in range(6):
                    source = dist.recv(received := torch.empty(count, dtype=torch.int64))
                    assert received.unique().tolist() == [10 * source + sources.count(source)]
                    sources.append(source)
                assert sorted(sources) == [1, 1, 2, 2, 3, 3]
            else:
                for number in range(2):
                    dist.send(torch.full((count,), 10 * rank + number), 0)
            dist.barrier()


@ranks(3, group=None)
def test_a_receive_from_any_source_takes_only_messages_with_its_tag(rank):
    with torch_group(rank):
        first, second, third = (torch.zeros(2, dtype=torch.int64) for _ in range(3))
        if rank == 0:
            named = dist.irecv(first, src=1, tag=7)
            any_source = dist.irecv(second, tag=8)
            assert not any_source.is_completed()
            dist.barrier()  # now the other ranks send
            assert any_source.wait() and any_source.source_rank() == 2 and second.tolist() == [28, 28]
            dist.send(second, 1)  # now rank 1 sends with the same tag
            assert named.wait() and first.tolist() == [17, 17]
            assert dist.recv(third, tag=8) == 1 and third.tolist() == [18, 18]
        else:
            dist.barrier()
            if rank == 1:
                dist.send(torch.tensor([17, 17]), 0, tag=7)
                dist.recv(first, src=0)
                dist.send(torch.tensor([18, 18]), 0, tag=8)
            else:
                dist.send(torch.tensor([28, 28]), 0, tag=8)
        dist.barrier()


@ranks(3, group=None)
def test_a_receive_from_any_source_without_a_sender(rank):
    with torch_group(rank, timeout_s=2 if rank == 0 else 60):
        if rank == 0:
            with pytest.raises(DeadlineError, match="Ranks 1-2 of 3") as caught:
                dist.recv(torch.empty(1))
            assert caught.value.late == (1, 2)
        else:
            with pytest.raises(DeadlineError):
                dist.barrier()


@ranks(2, group=None)
def test_a_dropped_receive_still_arrives(rank):
    with torch_group(rank):
        if rank == 0:
            dist.irecv(target := torch.zeros(3, 2).t(), 1)  # the Work is dropped
            dist.irecv(last := torch.zeros(1), 1).wait()
            assert dist.isend(torch.zeros(1), 1).wait()
            assert (last.item(), target.unique().tolist()) == (2, [1])
        else:
            dist.send(torch.ones(2, 3), 0)
            dist.send(torch.full((1,), 2.0), 0)
            dist.recv(torch.zeros(1), 0)


@ranks(3, group=None)
def test_the_groups_timeout_is_the_deadline(rank):
    with torch_group(rank):
        dist.barrier()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))  # also the deadline for forming it
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(DeadlineError, match="Rank 1 of 2 did not arrive") as caught:
                dist.all_reduce(torch.zeros(1), group=group)
            assert 1.4 < time.monotonic() - begin < 30
            assert caught.value.late == (1,)
        dist.barrier()


@ranks(3, group=None)
def test_a_barrier_with_a_timeout_names_the_late_ranks(rank):
    """This is torch's monitored_barrier, which torch allowed for Gloo only before 2.15."""
    with torch_group(rank):
        assert dist.get_backend() == "paceline"
        group = dist.new_group([0, 1, 2])
        if rank == 0:
            with pytest.raises(DeadlineError, match="Ranks 1-2 of 3 did not arrive") as caught:
                group.barrier(timeout=timedelta(seconds=0.3)).wait()
            assert caught.value.late == (1, 2)
            with pytest.raises(DeadlineError, match="Ranks 1-2 of 3 did not arrive"):
                group.monitored_barrier(timedelta(seconds=0.3))
            with pytest.raises(
                (ValueError, DeadlineError), match=r"only implemented for GLOO|Ranks 1-2 of 3"
            ):
                dist.monitored_barrier(group, timedelta(seconds=0.3))
        dist.barrier()


@ranks(3, group=None, dies={1: signal.SIGKILL})
def test_a_killed_rank_is_named(rank):
    with torch_group(rank):
        dist.barrier()
        if rank == 1:
            signal.raise_signal(signal.SIGKILL)
        works = [dist.all_reduce(torch.zeros(10), async_op=True) for _ in range(3)]
        with pytest.raises(PeerLostError, match="Rank 1 of 3 died"):
            works[0].wait()
        with pytest.raises((PeerLostError, GroupClosedError)):
            dist.all_reduce(torch.zeros(10))


@ranks(2, group=None)
def test_a_destroyed_group_is_closed(rank):
    with torch_group(rank):
        group = dist.new_group([0, 1])
        last = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.destroy_process_group(group)
        assert last.wait()
        with pytest.raises(GroupClosedError):
            group.allreduce([torch.ones(1)]).wait()
    with torch_group(rank, "cpu:paceline"):  # another group can be made
        dist.all_reduce(tensor := torch.ones(1))
        assert tensor.item() == 2


@ranks(2, group=None)
def test_exiting_without_destroying_the_group(rank):
    """The other rank is notified at once, and the exit neither hangs nor prints anything."""
    manager = torch_group(rank)
    manager.__enter__()
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    if rank == 1:
        with pytest.raises(PeerLostError, match="Rank 0 of 2 left"):
            dist.all_reduce(torch.ones(1), group=group)


def test_the_error_on_several_hosts_shows_what_to_use():
    from paceline.torch.backend.registration import _several_hosts

    error = _several_hosts(((0, 1), (2, 3)))
    assert isinstance(error, ConfigError) and error.hosts == ((0, 1), (2, 3))
    assert "host 1: ranks 2-3" in str(error) and "DistributedDataParallel" in str(error)
