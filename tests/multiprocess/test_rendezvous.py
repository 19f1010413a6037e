"""How ranks find each other, and the errors that they raise if they cannot."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.errors import ConfigError, RendezvousError
from paceline.rendezvous.rendezvous_address import hub_address
from paceline.rendezvous.unix_socket_exchange import UnixSocketExchange
from tests.harness import ranks, run_ranks
from tests.multiprocess.files_and_threads import files_and_threads, until_no_more_than


def init(rank, world_size, **options):
    options = {"job_id": os.environ["PACELINE_JOB_ID"], "timeout_s": 30} | options
    return paceline.init(rank=rank, world_size=world_size, **options)


def error_of(call):
    """Return the error that `call` raises, and the seconds it took."""
    started = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        call()
    return caught.value, time.monotonic() - started


@ranks(3, group=None)
def test_forming_groups_repeatedly_leaks_nothing(rank):
    init(rank, 3).close()
    before = files_and_threads()
    for repeat in range(20):
        with init(rank, 3, name=f"group {repeat % 3}") as group:
            total = np.ones(3)
            group.all_reduce(total)
            assert total[0] == 3
        del group
        until_no_more_than(before)
    mine = hub_address(os.environ["PACELINE_JOB_ID"], "world")
    assert mine not in Path("/proc/net/unix").read_text()


@ranks(3, group=None)
def test_the_launchers_variables_are_enough(rank):
    with paceline.init(timeout_s=30) as group:
        assert (group.rank, group.world_size, group.name) == (rank, 3, "world")
        group.barrier()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with paceline.init(address=address, name="by address", timeout_s=30) as group:
        group.barrier()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rank": 0, "world_size": 0}, "1 to 128"),
        ({"rank": 0, "world_size": -2}, "1 to 128"),
        ({"rank": 2, "world_size": 2}, "0 to 1"),
        ({"rank": -1, "world_size": 2}, "0 to 1"),
        ({"rank": 0, "world_size": 129}, "1 to 128"),
        ({"rank": 0, "world_size": 2, "timeout_s": 0}, "timeout_s"),
        ({"rank": 0, "world_size": 2, "address": "nowhere"}, "host:port"),
        ({"rank": 0, "world_size": 2, "address": "host:99999"}, "1 to 65535"),
        ({"rank": 0}, "No launcher"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        paceline.init(**{"job_id": "never"} | arguments)


def start_without(group, absent):
    """All processes run before this, so no rank is late because its process started late."""
    if group.rank == absent:
        return None
    error, waited_s = error_of(lambda: init(group.rank, 4, name="without one", timeout_s=1.0))
    return error.missing, str(error), waited_s


@pytest.mark.parametrize("absent", [0, 2, 3])
def test_a_missing_rank_is_named_on_every_other_rank(absent):
    for rank, result in enumerate(run_ranks(start_without, 4, {"absent": absent})):
        if rank == absent:
            continue
        missing, text, waited_s = result
        assert missing == (absent,)
        assert f"rank {absent}" in text.lower()
        assert waited_s < 20
        if 0 in (rank, absent):  # other ranks learn it from rank 0, which may have begun before them
            assert waited_s > 0.8


@ranks(2, group=None)
def test_a_waiting_rank_prints_for_which_ranks(rank, monkeypatch):
    monkeypatch.setattr("paceline.rendezvous.unix_socket_exchange._SAY_EVERY_S", 0.05)
    with contextlib.redirect_stderr(io.StringIO()) as output, pytest.raises(RendezvousError):
        init(rank, 2, name=f"of rank {rank} alone", timeout_s=0.5)
    awaited = ("rank 1", "rank 0 to come on this host")[rank]
    assert f"paceline: rank {rank} of 2 on host " in output.getvalue()
    assert f"has waited 0 s for {awaited}\n" in output.getvalue()


@ranks(1, group=None)
def test_a_rank_that_waits_for_another_host_prints_that_init_connects_one_host(rank, monkeypatch):
    monkeypatch.setattr("paceline.rendezvous.unix_socket_exchange._SAY_EVERY_S", 0.05)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with contextlib.redirect_stderr(io.StringIO()) as output, pytest.raises(RendezvousError):
        paceline.init(timeout_s=0.5)
    assert "for rank 1; the launcher has started 1 of 2 ranks on this host, and paceline.init()" in (
        output.getvalue()
    )


@ranks(2, group=None)
def test_hosts_of_a_launcher_that_are_one_machine_connect(rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with paceline.init(timeout_s=60) as group:
        assert group.world_size == 2


@ranks(3)
def test_a_wrong_world_size_stops_all_ranks(group):
    rank = group.rank
    error, _ = error_of(lambda: init(rank, 4 if rank == 1 else 3, name="of 3 or 4", timeout_s=2.0))
    if rank == 0:
        assert "Rank 1 and rank 0 disagree on the number of ranks" in str(error)
        assert "world_size 3" in error.expected and "world_size 4" in error.got
    if rank == 1:
        assert "rank 0 has world_size 3, the caller has 4" in error.seen


@ranks(4, group=None)
def test_a_second_process_with_the_same_rank_is_refused(rank):
    """Processes 1 and 3 both claim rank 1; the one that is refused joins as rank 2."""
    if rank == 2:
        return
    with init(0, 3) if rank == 0 else first_as(1, 2) as group:
        assert sorted(group.all_gather(np.array([group.rank]))[:, 0]) == [0, 1, 2]


def first_as(rank, then, world_size=3, problem="has joined already"):
    try:
        return init(rank, world_size)
    except RendezvousError as error:
        assert problem in str(error), str(error)
        return init(then, world_size)


@ranks(2, group=None)
def test_a_second_rank_zero_is_refused(rank):
    with first_as(0, 1, 2, "rank 0 has joined already; two processes have the same rank") as group:
        assert sorted(group.all_gather(np.array([group.rank]))[:, 0]) == [0, 1]


@ranks(2, group=None)
def test_two_jobs_at_one_address_are_kept_apart(rank):
    """Both are rank 0 of a job of two; the later one is refused, learns the other job's id, and joins it."""
    jobs = ("blue", "green")
    address = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    try:
        group = init(0, 2, address=address, job_id=jobs[rank])
    except RendezvousError as error:
        assert f"this is job {jobs[1 - rank]!r}, the caller belongs to job {jobs[rank]!r}" in error.seen
        joining, _ = error_of(lambda: init(1, 2, address=address, job_id=jobs[rank]))
        assert "Rank 1 of 2 was refused by rank 0" in str(joining)
        assert f"this is job {jobs[1 - rank]!r}, the caller belongs to job {jobs[rank]!r}" in joining.seen
        group = init(1, 2, address=address, job_id=jobs[1 - rank])
    with group:
        group.barrier()


@ranks(4)
def test_groups_of_one_job_form_at_the_same_time(group):
    """In each rank, several threads form groups with different names, in different orders."""
    formed = {}

    def form(name):
        formed[name] = init(group.rank, 4, name=name)

    names = ["red", "green", "blue"]
    order = names[group.rank % 3 :] + names[: group.rank % 3]
    threads = [threading.Thread(target=form, args=(name,)) for name in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        with formed[name] as each:
            assert each.all_gather(np.array([group.rank]))[:, 0].tolist() == [0, 1, 2, 3]


@ranks(3, group=None)
def test_the_exchange_gathers_all_payloads_on_all_ranks(rank):
    job_id = os.environ["PACELINE_JOB_ID"]
    with UnixSocketExchange(rank, 3, key="here", job_id=job_id, name="x", timeout_s=30) as exchange:
        assert (exchange.rank, exchange.world_size) == (rank, 3)
        for payload in (b"", bytes([rank]) * 5, bytes([rank]) * 2_000_000):
            got = exchange.all_gather(payload, 30)
            assert [len(each) for each in got] == [len(payload)] * 3
            assert all(set(each) <= {r} for r, each in enumerate(got))
