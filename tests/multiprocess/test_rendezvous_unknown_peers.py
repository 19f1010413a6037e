"""Unknown peers at the rendezvous address, and ranks that die there, do not harm or hang the job."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import multiprocessing
import os
import resource
import socket
import time
from dataclasses import asdict

import pytest

import paceline
from paceline import _core
from paceline.errors import PacelineError, RegionError, RendezvousError
from paceline.rendezvous import shared_memory
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.frames import Frame, listen, receive_frame, send_frame
from paceline.rendezvous.messages import Hello
from paceline.rendezvous.rendezvous_address import hub_address
from paceline.rendezvous.shared_memory_failure import SharedMemoryFailure
from tests.harness import ranks, run_ranks


def init(rank, world_size, **options):
    job_id = os.environ["PACELINE_JOB_ID"]
    return paceline.init(rank=rank, world_size=world_size, **{"job_id": job_id, "timeout_s": 120} | options)


def hello_of(rank, world_size):
    return Hello(rank, world_size, os.environ["PACELINE_JOB_ID"], "world", os.getpid())


def rendezvous_address():
    return "\0" + hub_address(os.environ["PACELINE_JOB_ID"], "world")


def dial(address=None):
    """Connect to rank 0's rendezvous address as soon as it exists."""
    address = address or rendezvous_address()
    deadline = Deadline(60)
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(address)
            return peer
        except OSError:
            peer.close()
            assert not deadline.is_over()
            time.sleep(0.01)


def frame(kind, payload):
    return bytes([kind]) + len(payload).to_bytes(8, "little") + payload


GARBAGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100,
    frame(1, b"{"),
    frame(1, b"[1, 2]"),
    frame(1, b'{"rank": 1}'),
    frame(1, json.dumps(asdict(Hello(1, 2, "", "", 0)) | {"rank": "one"}).encode()),
    frame(2, b"welcome"),
    frame(99, b"?"),
    (1).to_bytes(1, "little") + (1 << 60).to_bytes(8, "little"),
    frame(1, b"x")[:5],  # half a message, and nothing after it
    frame(1, b"[" * 50_000),  # nested too deeply
    frame(1, b"x" * 70_000),  # longer than a hello may be
    frame(1, b"\xff\xfe\x00"),
    frame(1, b"{}") + b"and more",
]


@ranks(2, group=None)
def test_unknown_peers_are_rejected(rank):
    if rank == 0:
        group = init(0, 2)
    else:
        silent = [dial() for _ in range(3)]  # send nothing, and stay connected
        for garbage in GARBAGE:
            with dial() as peer, contextlib.suppress(OSError):  # rank 0 closes some of them
                peer.sendall(garbage)
        started = time.monotonic()
        group = init(1, 2)
        assert time.monotonic() - started < 60
        for peer in silent:
            peer.close()
    with group:
        group.barrier()


@ranks(2, group=None)
def test_peers_that_send_one_byte_at_a_time_do_not_delay_ranks(rank):
    """However slowly: they send one byte in the time in which rank 1 could send its whole hello."""
    if rank == 0:
        group = init(0, 2)
    else:
        slow = [dial() for _ in range(20)]
        for at in range(5):
            for peer in slow:
                peer.sendall(frame(1, b"x" * 1000)[at : at + 1])
        group = init(1, 2, timeout_s=60)
        for peer in slow:
            peer.close()
    with group:
        group.barrier()


@ranks(2, group=None)
def test_a_rank_connects_again_on_request(rank):
    """Rank 0 sends FULL to the oldest of too many connections that have sent nothing yet."""
    if rank == 0:
        with listen(rendezvous_address()[1:]) as listener:
            peer, _ = listener.accept()
        with peer:
            receive_frame(peer, Deadline(60))
            send_frame(peer, Frame.FULL, b"", Deadline(60))
    with init(rank, 2) as group:
        group.barrier()


def flood(count, address):
    """Open connections that send nothing."""
    return [dial(address) for _ in range(count)]


@pytest.mark.parametrize(
    "user", ["this", pytest.param("another", marks=pytest.mark.skipif(os.geteuid() != 0, reason="not root"))]
)
@ranks(2, group=None)
def test_more_connections_than_rank_0_has_descriptors_for(rank, user):
    if rank == 0:
        few = len(os.listdir("/proc/self/fd")) + 16
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        group = init(0, 2)
    elif user == "this":
        silent = flood(200, rendezvous_address())
        group = init(1, 2)
        del silent
    else:
        done = multiprocessing.get_context("fork").Event()
        stay = multiprocessing.get_context("fork").Event()
        address = rendezvous_address()  # any process can compute it

        def attack():
            os.setuid(65534)
            silent = flood(200, address)
            done.set()
            stay.wait(60)
            del silent

        attacker = multiprocessing.get_context("fork").Process(target=attack, daemon=True)
        attacker.start()
        assert done.wait(60)
        group = init(1, 2)
        stay.set()
        attacker.join()
    with group:
        group.barrier()


@ranks(2, group=None)
def test_the_number_of_silent_connections_is_limited(rank):
    """However many descriptors there are: the connections that were silent the longest are closed."""
    if rank == 1:
        silent = flood(200, rendezvous_address())
        assert receive_frame(silent[0], Deadline(30)) == (Frame.FULL, b"")
        assert silent[0].recv(1) == b""  # closed, while rank 0 waits for this rank
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
    with init(rank, 2) as group:
        group.barrier()


def die_as(rank, dying):
    """Rank `dying` of 3 dies in the middle of the rendezvous; the others return their errors and waits."""
    if rank == dying == 0:
        listener = listen(hub_address(os.environ["PACELINE_JOB_ID"], "world"), 3)
        for _ in range(2):
            peer, _ = listener.accept()
            receive_frame(peer, Deadline(60))
        os._exit(9)
    if rank == dying:
        peer = dial()
        send_frame(peer, Frame.HELLO, json.dumps(asdict(hello_of(rank, 3))).encode(), Deadline(60))
        receive_frame(peer, Deadline(60))  # all ranks have connected
        os._exit(9)
    started = time.monotonic()
    try:
        init(rank, 3)
    except RendezvousError as error:
        return error.missing, str(error), time.monotonic() - started


@pytest.mark.parametrize("dying", [0, 2])
def test_a_death_during_the_rendezvous_is_reported_at_once(dying):
    results = run_ranks(die_as, 3, {"dying": dying}, group=None, dies={dying: 9})
    for missing, text, waited_s in (result for result in results if result is not None):
        assert missing == (dying,)
        assert "lost" in text
        assert waited_s < 60


def fail_to_map(rank, how):
    """Rank 1 has received the region's descriptor; then it dies, or cannot map the region."""
    if rank == 1:

        def fail(*_args, **_options):
            if how == "dies":
                os._exit(9)
            raise RegionError("Shared memory could not be reserved.", seen="mapping: Cannot allocate memory")

        _core.HostGroup = fail
    started = time.monotonic()
    try:
        init(rank, 3)
    except PacelineError as error:
        return type(error), str(error), time.monotonic() - started


def test_a_rank_that_cannot_map_the_region_is_reported_on_all():
    for rank, (kind, text, waited_s) in enumerate(run_ranks(fail_to_map, 3, {"how": "raises"}, group=None)):
        assert kind is RegionError
        assert "Cannot allocate memory" in text
        assert "ank 1" in text or rank == 1
        assert waited_s < 60


def test_a_rank_that_dies_before_it_maps_the_region():
    results = run_ranks(fail_to_map, 3, {"how": "dies"}, group=None, dies={1: 9})
    for kind, text, waited_s in (results[0], results[2]):
        assert kind is RendezvousError
        assert "Rank 1 of 3 was lost" in text
        assert waited_s < 60


@ranks(2, group=None)
def test_a_region_of_another_job_is_refused(rank):
    """The nonce shows whether the memory is the announced one."""
    nonce = bytes(range(16))
    fd = _core.create_region(1, nonce)
    assert _core.region_nonce(fd) == nonce
    with pytest.raises(PacelineError, match="belongs to another job"):
        _core.HostGroup(fd, 0, bytes(16), "x", 1.0, 1.0)
    with pytest.raises(PacelineError, match="does not fit a region made for 1 ranks"):
        _core.HostGroup(fd, 1, nonce, "x", 1.0, 1.0)
    with pytest.raises(PacelineError, match="16 bytes"):
        _core.HostGroup(fd, 0, b"short", "x", 1.0, 1.0)
    with pytest.raises(PacelineError, match="world or nonce"):
        _core.create_region(129, nonce)
    empty = os.memfd_create("empty")
    with pytest.raises(RegionError, match="not sealed"):
        _core.HostGroup(empty, 0, nonce, "x", 1.0, 1.0)
    with pytest.raises(RegionError, match="can't be read"):
        _core.region_nonce(empty)
    os.close(empty)
    os.close(fd)


@ranks(2, group=None)
def test_the_region_is_received_close_on_exec(rank):
    """From the start: a program that another thread starts meanwhile must not inherit it."""
    inheritable = []

    def check(fd, nonce, check_nonce=shared_memory._check_nonce):
        inheritable.append(os.get_inheritable(fd))
        check_nonce(fd, nonce)

    shared_memory._check_nonce = check
    init(rank, 2).close()
    assert inheritable == [False] * rank


def refuse_to_share(rank, has_boot_id):
    """Rank 1 is on rank 0's host, but cannot receive its memory."""
    if rank == 1:

        def refuse(*_args):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        shared_memory.take_descriptor = refuse
    if not has_boot_id:
        shared_memory._host_hint = lambda: (
            "/4026531840/0",
            SharedMemoryFailure("could not read the boot id"),
        )
    logged = io.StringIO()
    logging.getLogger("paceline").addHandler(logging.StreamHandler(logged))
    with pytest.raises(PacelineError) as caught:
        init(rank, 3)
    return type(caught.value), str(caught.value), logged.getvalue()


def test_ranks_of_one_host_that_share_no_memory_are_an_error_on_all():
    for kind, text, _ in run_ranks(refuse_to_share, 3, {"has_boot_id": True}, group=None):
        assert kind is RegionError
        assert "Rank 1 could not take the shared memory of group 'world'" in text
        assert "could not take it from rank 0: [Errno 1] Operation not permitted" in text
        assert "a seccomp filter" in text
        assert 'reduce_through="group"' in text


def test_ranks_that_may_be_on_one_host_count_as_several_with_a_warning():
    """If the boot id is hidden, equal hints do not prove that the host is the same."""
    results = run_ranks(refuse_to_share, 3, {"has_boot_id": False}, group=None)
    for rank, (kind, text, logged) in enumerate(results):
        assert kind is RendezvousError
        assert "ranks 0, 2; rank 1" in text
        assert ("rank 1 of 3 counts as a host of its own" in logged) == (rank == 1)
        assert ("could not take it from rank 0: [Errno 1] Operation not permitted" in logged) == (rank == 1)
