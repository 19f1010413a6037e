"""The control channel: failures of one rank reach all others, and a rank that does not fit is refused.

Ranks are threads of this process, each with its own connections.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import random
import select
import shutil
import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, PeerLostError, RendezvousError
from paceline.health import channel_setup, channel_tree, control_channel, tls
from paceline.health.control_channel import allowed_silence_s, form_channel
from paceline.health.handshake import Facts, Seal, mismatch
from paceline.health.peer_errors import How, unpack_failure
from paceline.health.peer_monitor import ChannelSource, PeerMonitor
from paceline.reducer.process_group_waits import ProcessGroupWaits
from paceline.rendezvous.frames import Frame, FrameStream, frame
from paceline.rendezvous.messages import join_payloads, split_payloads
from paceline.rendezvous.secret import NO_SECRET, find_secret

HOSTS = ((0, 1), (2, 3))
SECRET = b"0123456789abcdef"
TLS_HANDSHAKE = 0x16  # the kind of a record
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def facts_of(rank, hosts=HOSTS, **others):
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    given = {
        "rank": rank,
        "world_size": sum(map(len, hosts)),
        "host": f"node{host}",
        "pid": 100 + rank,
        "local_ranks": list(hosts[host]),
        "paceline": "0.1.0",
        "framework": "torch 2.13.0",
        "job": "",
        "generation": "0",
        "clock_s": time.time(),
        "has_secret": True,
    }
    return Facts(**{**given, **others})


class Together:
    """An exchange between threads."""

    def __init__(self, world_size=4):
        self.barrier, self.payloads = threading.Barrier(world_size), [b""] * world_size

    def of(self, rank):
        return _Exchange(self, rank)


class _Exchange:
    def __init__(self, together, rank):
        self.together, self.rank, self.world_size = together, rank, len(together.payloads)

    def all_gather(self, payload, timeout_s):
        self.together.payloads[self.rank] = payload
        self.together.barrier.wait(timeout_s)
        return list(self.together.payloads)


def form(facts=None, secrets=None, timeout_s=60.0, hosts=HOSTS, outcomes=None):
    """The channel of each rank, or its error; written into `outcomes` as soon as it is there."""
    count = sum(map(len, hosts))
    together = Together(count)
    outcomes = [None] * count if outcomes is None else outcomes
    facts = facts or [facts_of(rank, hosts) for rank in range(count)]
    secrets = secrets or [SECRET] * count

    def run(rank):
        try:
            outcomes[rank] = form_channel(together.of(rank), facts[rank], hosts, secrets[rank], timeout_s)
        except RendezvousError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return outcomes


def end(channels):
    """Leave, and wait until all threads have."""
    for each in channels:
        each.close()
    for each in channels:
        each._thread.join(30)
        assert not each._thread.is_alive()


@contextlib.contextmanager
def formed(secret=SECRET):
    """The channels of all ranks, which fit."""
    facts = [facts_of(rank, has_secret=bool(secret)) for rank in range(4)]
    found = form(facts, secrets=[secret] * 4)
    assert not [each for each in found if isinstance(each, Exception)], found
    yield found
    end(found)


@pytest.fixture
def channels():
    with formed() as found:
        yield found


def kill(channel):
    """Do as the kernel does to the connections of a process that is killed."""
    channel._is_closed = True  # its thread dies first, and sends nothing any more
    for connection in list(channel._connections.values()):
        with contextlib.suppress(OSError):  # the thread has closed it already
            connection.socket.shutdown(socket.SHUT_RDWR)


class Waiter:
    """Waits for an event, and is called."""

    def __init__(self, channel):
        self.called = threading.Event()
        self.error = None
        channel.at_failure(self.call)

    def call(self, error):
        self.error = error
        self.called.set()


@pytest.mark.parametrize("guilty", [0, 3])
def test_an_exception_reaches_all_others_with_its_text(channels, guilty):
    others = [each for rank, each in enumerate(channels) if rank != guilty]
    waiters = [Waiter(each) for each in others]
    channels[guilty].report_failure(ValueError("the cause"))
    for channel, waiter in zip(others, waiters, strict=True):
        error = channel.wait(30.0)
        assert isinstance(error, PeerLostError) and error.lost == (guilty,)
        assert "ValueError: the cause" in error.seen
        assert f"rank {guilty} on host node{guilty // 2} (pid {100 + guilty})" in error.seen
        assert waiter.called.wait(30.0) and waiter.error is error
    assert channels[guilty].failure is None


@pytest.mark.parametrize("dead", [0, 2])
def test_a_death_is_known_to_all_others(channels, dead):
    others = [each for rank, each in enumerate(channels) if rank != dead]
    waiters = [Waiter(each) for each in others]
    kill(channels[dead])
    for channel, waiter in zip(others, waiters, strict=True):
        error = channel.wait(30.0)
        assert isinstance(error, PeerLostError) and error.lost == (dead,)
        who = f"ank {dead} of 4 on host node{dead // 2}"
        # A beat to a closed end resets the connection: its sender then reads a reset, and not an end.
        assert error.summary in (f"R{who} died.", f"The connection to r{who} was reset.")
        assert f"pid {100 + dead}" in error.seen
        assert waiter.called.wait(30.0) and waiter.error is error


def test_a_report_about_another_rank_names_the_host_of_that_rank(channels):
    channels[2].report_failure(PeerLostError("Rank 3 of 4 died.", seen="pid 103 crashed: SIGSEGV", lost=(3,)))
    error = channels[1].wait(30.0)
    assert error.lost == (3,) and error.summary == "Rank 3 of 4 died."
    assert "SIGSEGV" in error.seen and "told by rank 2 on host node1" in error.seen
    assert "to blame: rank 3 on host node1 (pid 103)" in error.seen


@pytest.mark.parametrize(
    "words",
    [
        "{",
        "[" * 990,
        "[1]",
        "{}",
        '{"kind": "PeerLostError", "summary": "x", "fields": []}',
        '{"kind": "SystemExit", "summary": "x", "fields": {}}',
    ],
    ids=lambda words: words[:30],
)
def test_words_of_an_unknown_peer_are_shown_as_they_are(words):
    error = PeerLostError("Rank 1 raised.", seen=f"between hosts: {words}", lost=(1,))
    assert unpack_failure(error) is error


def test_only_the_first_failure_counts(channels):
    channels[3].report_failure(ValueError("first"))
    assert "first" in channels[1].wait(30.0).seen
    channels[1].report_failure(ValueError("a consequence"))
    kill(channels[3])
    time.sleep(0.3)
    for rank in (0, 1, 2):
        assert "first" in channels[rank].wait(30.0).seen


def test_who_leaves_in_good_order_is_no_failure(channels):
    channels[3].close()
    deadline = time.monotonic() + 30.0
    while not all(channels[rank].left for rank in range(3)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [each.rank for each in channels[1].left] == [3]
    assert channels[1].wait(0.2) is None
    channels[2].report_failure(ValueError("afterwards"))  # the others continue
    assert "afterwards" in channels[1].wait(30.0).seen


def test_who_asks_to_be_called_after_a_failure_is_called(channels):
    channels[3].report_failure(ValueError("the cause"))
    channels[1].wait(30.0)
    assert Waiter(channels[1]).called.wait(30.0)


def test_a_channel_without_references_leaves(channels):
    gone = channels[3]._thread
    channels[3] = channels[2]  # the last reference, except for the thread's in its turns
    gone.join(30.0)
    assert not gone.is_alive()
    assert channels[1].wait(0.2) is None


def waits_of(channel):
    """The waits of rank 1 for a process group that never completes."""
    return ProcessGroupWaits(
        1,
        4,
        words="a group",
        timeout_s=60.0,
        warn_after_s=60.0,
        peer_monitor=PeerMonitor(ChannelSource(channel)),
    )


def test_a_rank_that_waits_for_a_process_group_learns_of_a_failure(channels):
    timer = threading.Timer(0.2, channels[3].report_failure, (ValueError("the cause"),))
    timer.start()
    with pytest.raises(PeerLostError) as caught:
        waits_of(channels[1]).poll(lambda: False, "a sum of values")
    timer.join()
    assert caught.value.lost == (3,) and "ValueError: the cause" in caught.value.seen
    assert "a sum of values, over a group" in caught.value.where


def test_an_engine_that_lost_a_connection_learns_whose(channels):
    kill(channels[3])
    error = waits_of(channels[1]).failed(RuntimeError("Connection closed by peer"), "a sum of values")
    assert isinstance(error, PeerLostError) and error.lost == (3,)
    assert error.summary == "Rank 3 of 4 on host node1 died."


def test_an_engine_that_lost_a_connection_learns_who_has_left(channels):
    channels[3].close()
    error = waits_of(channels[1]).failed(RuntimeError("Connection closed by peer"), "a sum of values")
    assert isinstance(error, PeerLostError) and error.lost == (3,)
    assert error.summary == "Rank 3 of 4 has left." and "host node1" in error.seen


def test_a_wrong_secret_is_refused_at_once_with_words_on_all_sides():
    started = time.monotonic()
    outcomes = form(secrets=(SECRET, SECRET, SECRET, b"another secret!!"))
    assert time.monotonic() - started < 30.0
    for error in outcomes:
        assert isinstance(error, RendezvousError), outcomes
        assert "rank 0 on host node0 (pid 100) and rank 3 on host node1 (pid 103)" in error.seen
        assert "secrets that differ" in error.seen and "PACELINE_SECRET_FILE" in error.hint


def test_a_rank_without_the_secret_is_refused():
    facts = [facts_of(rank, has_secret=rank != 2) for rank in range(4)]
    outcomes = form(facts, secrets=(SECRET, SECRET, b"", SECRET))
    for error in outcomes:
        assert isinstance(error, RendezvousError)
        assert "rank 2 on host node1 (pid 102) has none" in error.seen


def test_other_versions_are_refused_on_all_sides():
    facts = [facts_of(rank, paceline="0.0.9" if rank == 1 else "0.1.0") for rank in range(4)]
    for error in form(facts):
        assert isinstance(error, RendezvousError)
        assert "rank 1 on host node0 (pid 101) has Paceline 0.0.9" in error.seen


@pytest.mark.parametrize(
    "other, words",
    [
        ({"world_size": 5}, "expects 5"),
        ({"rank": 0}, "two processes claim rank 0"),
        ({"job": "cafe"}, "is of job cafe"),
        ({"framework": "torch 2.12.0"}, "has torch 2.12.0"),
        ({"local_ranks": [1, 3]}, "takes ranks [1, 3]"),
    ],
)
def test_what_does_not_fit_is_reported_in_words(other, words):
    hub = facts_of(0)
    assert mismatch(hub, facts_of(3), [hub], [2, 3]) is None
    found = mismatch(hub, replace(facts_of(3), **other), [hub], [2, 3])
    assert found is not None and found.hint
    assert words in found.seen


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0, float("nan")])
def test_clocks_far_apart_are_refused(offset_s):
    hub = facts_of(0, clock_s=1e9)
    found = mismatch(hub, facts_of(3, clock_s=1e9 + offset_s), [hub], [2, 3])
    assert found is not None and "the clock of rank 3 on host node1" in found.seen
    assert mismatch(hub, facts_of(3, clock_s=1e9 + 30.0), [hub], [2, 3]) is None


def test_unknown_peers_do_not_disturb(monkeypatch):
    """They hold connections open, send garbage, or end at once, before and while the ranks come."""
    listen, stop = channel_setup._listen, threading.Event()
    held, threads = [], []

    def listen_among_unknown_peers():
        listener, address = listen()
        port = listener.getsockname()[1]

        def disturb():
            generator = random.Random(0)
            for number in range(100):
                with contextlib.suppress(OSError):
                    unknown_peer = socket.create_connection(("127.0.0.1", port), timeout=5)
                    held.append(unknown_peer)
                    if number % 3 == 0:
                        unknown_peer.sendall(generator.randbytes(number * 7))
                    elif number % 3 == 1:
                        unknown_peer.sendall(frame(Frame.HELLO, b"[" * 4000))
                    else:
                        unknown_peer.sendall(frame(Frame.HELLO, b"")[:1] + (1 << 40).to_bytes(8, "little"))
                if stop.is_set():
                    return

        threads.append(threading.Thread(target=disturb))
        threads[0].start()
        return listener, address

    monkeypatch.setattr(channel_setup, "_listen", listen_among_unknown_peers)
    try:
        channels = form()
        assert not [each for each in channels if isinstance(each, Exception)], channels
        for channel in channels:
            channel.close()
    finally:
        stop.set()
        threads[0].join(60)
        for each in held:
            each.close()


def test_a_rank_that_does_not_come_is_named_on_all_sides(monkeypatch):
    """Rank 3 reaches no process at any address."""
    join = channel_setup._join
    monkeypatch.setattr(
        channel_setup,
        "_join",
        lambda place, parent, facts, **rest: join(
            replace(place, port=1) if facts[0].rank == 3 else place, parent, facts, **rest
        ),
    )
    outcomes = form(timeout_s=2.0)
    for rank, error in enumerate(outcomes):
        assert isinstance(error, RendezvousError), outcomes
        assert ("rank 3" in error.seen) or rank == 3
    assert "could not reach the control channel" in outcomes[3].summary and outcomes[3].missing == (0,)
    assert outcomes[0].missing == (3,)


def test_the_first_reason_is_reported_for_a_rank_that_has_tried_again(monkeypatch):
    """An unknown peer answers once at the address of rank 0, and afterwards no process does."""
    join, unknown_peer = channel_setup._join, socket.create_server(("127.0.0.1", 0))

    def answer_once():
        with unknown_peer:
            link, _ = unknown_peer.accept()
        with link:
            link.sendall(frame(Frame.CHALLENGE, b"of another job"))

    def mislead(place, parent, facts, **rest):
        if facts[0].rank == 3:
            place = replace(place, port=unknown_peer.getsockname()[1], addresses=["127.0.0.1"])
            threading.Thread(target=answer_once).start()
        return join(place, parent, facts, **rest)

    monkeypatch.setattr(channel_setup, "_join", mislead)
    error = form(timeout_s=2.0)[3]
    assert "could not reach the control channel" in error.summary
    first, last = error.seen.split("; later: ")
    assert first.startswith("127.0.0.1: ") and "refused" not in first and "refused" in last


# --- frames and codes ---


@given(
    st.lists(st.tuples(st.sampled_from([Frame.BEAT, Frame.FAILED]), st.binary(max_size=50)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_frames_come_out_however_they_are_cut(frames, generator):
    stream, found = FrameStream(50), []
    data = b"".join(frame(*each) for each in frames)
    while data:
        cut = generator.randint(1, len(data))
        found += stream.feed(data[:cut])
        data = data[cut:]
    assert found == frames


def test_a_frame_that_is_too_long_ends_the_connection_before_it_has_come():
    with pytest.raises(ConnectionError):
        FrameStream(10).feed(frame(Frame.FAILED, bytes(11))[:9])


def test_what_is_altered_repeated_or_left_out_is_noticed():
    says = Seal(b"key")
    first, second = says.close(Frame.FAILED, b"one"), says.close(Frame.FAILED, b"two")
    receiver = Seal(b"key")
    assert receiver.open(Frame.FAILED, first) == b"one"
    for kind, payload in [
        (Frame.FAILED, first),
        (Frame.BEAT, second),
        (Frame.FAILED, second[:-1] + b"O"),
        (Frame.FAILED, b""),
    ]:
        with pytest.raises(ConnectionError):
            receiver.open(kind, payload)
    with pytest.raises(ConnectionError):
        Seal(b"key").open(Frame.FAILED, second)
    with pytest.raises(ConnectionError):
        Seal(b"yek").open(Frame.FAILED, first)


@pytest.mark.parametrize(
    "secret, words", [pytest.param(SECRET, "TLS", marks=needs_openssl), (b"", "altered")]
)
def test_a_member_that_speaks_without_the_key_is_lost(secret, words):
    """Like an attacker between the hosts, who has the connection and not the secret."""
    with formed(secret) as channels:
        channels[3]._connections[0].socket.send(frame(Frame.FAILED, bytes(100)))
        error = channels[1].wait(30.0)
        assert error.lost == (3,) and words in error.seen


# --- encryption ---


class Eavesdropper:
    """Stands between rank 3 and the hub, and receives all their messages.

    Args:
        change: Changes each chunk that comes from the hub.
    """

    def __init__(self, monkeypatch, change=lambda piece: piece):
        self.heard, self._change = bytearray(), change
        self._listener, self._links = socket.create_server(("127.0.0.1", 0)), []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        join = channel_setup._join

        def mislead(place, parent, facts, **rest):
            if facts[0].rank == 3:
                self._hub = ("127.0.0.1", place.port)
                self._threads[0].start()
                place = replace(place, port=self._listener.getsockname()[1], addresses=["127.0.0.1"])
            return join(place, parent, facts, **rest)

        monkeypatch.setattr(channel_setup, "_join", mislead)

    def _serve(self):
        rank, _ = self._listener.accept()
        hub = socket.create_connection(self._hub)
        self._links += [rank, hub]
        self._threads.append(threading.Thread(target=self._pass_on, args=(rank, hub, lambda piece: piece)))
        self._threads[-1].start()
        self._pass_on(hub, rank, self._change)

    def _pass_on(self, source, target, change):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.heard += piece
                target.sendall(change(piece))
        for link in (source, target):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def end(self):
        self._listener.close()
        for each in self._threads:
            each.join(30.0)
        for each in self._links:
            each.close()


@pytest.mark.parametrize(
    "secret", [pytest.param(SECRET, marks=needs_openssl), b""], ids=["with a secret", "without"]
)
def test_who_listens_reads_nothing_if_there_is_a_secret(secret, monkeypatch):
    between = Eavesdropper(monkeypatch)
    with formed(secret) as channels:
        channels[1].report_failure(ValueError("what the guilty rank says"))
        assert "what the guilty rank says" in channels[3].wait(30.0).seen
        is_encrypted = {each.is_encrypted for one in channels for each in one._connections.values()}
    between.end()
    assert is_encrypted == {bool(secret)}
    assert (b"what the guilty rank says" in between.heard) is not bool(secret)


@needs_openssl
def test_a_hub_that_is_made_to_speak_in_clear_is_none(monkeypatch):
    """An attacker between the hosts removes the certificate from the welcome."""

    def strip(piece):
        if piece[0] != Frame.WELCOME:
            return piece
        ((kind, welcome),) = FrameStream(1 << 16).feed(piece)
        table, fingerprint, proof = split_payloads(welcome, 3)
        assert len(fingerprint) == 32
        return frame(kind, join_payloads([table, b"", proof]))

    between = Eavesdropper(monkeypatch, strip)
    outcomes = form()
    assert isinstance(outcomes[3], RendezvousError)
    assert "does not know the secret of rank 3" in outcomes[3].seen
    # All of them first: a rank that leaves receives nothing more.
    assert [each.wait(30.0).lost for each in outcomes[:3]] == [(3,)] * 3
    for each in outcomes[:3]:
        each.close()
    between.end()


@needs_openssl
def test_a_connection_that_cannot_be_encrypted_is_reported_at_once(monkeypatch):
    """An attacker between the hosts changes the hub's key after it has welcomed the rank."""

    def change(piece):
        return piece[:-1] + b"?" if piece[0] == TLS_HANDSHAKE else piece

    between = Eavesdropper(monkeypatch, change)
    outcomes = form()
    assert outcomes[3].summary == "Rank 3 of 4 on host node1 could not encrypt its connection to rank 0."
    assert "TLS" in outcomes[3].seen
    assert [each.wait(30.0).lost for each in outcomes[:3]] == [(3,)] * 3
    for each in outcomes[:3]:
        each.close()
    between.end()


@needs_openssl
def test_a_rank_that_is_slow_to_encrypt_keeps_no_other_rank_waiting(monkeypatch):
    """One rank stops in mid-start; the others receive each other's messages, and later so does it."""
    encrypt, goes_on, counted = channel_setup._encrypt, threading.Event(), itertools.count()

    def encrypt_late(*arguments):
        if next(counted) == 0:
            assert goes_on.wait(60.0)
        return encrypt(*arguments)

    monkeypatch.setattr(channel_setup, "_encrypt", encrypt_late)
    outcomes = [None] * 4
    forming = threading.Thread(target=form, kwargs={"outcomes": outcomes})
    forming.start()
    deadline = time.monotonic() + 50.0
    while outcomes.count(None) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    (slow,) = (rank for rank, each in enumerate(outcomes) if each is None)
    *others, teller = (each for each in outcomes if each is not None)
    teller.report_failure(ValueError("the cause"))
    assert all("the cause" in each.wait(30.0).seen for each in others)
    goes_on.set()
    forming.join(60.0)
    assert "the cause" in outcomes[slow].wait(30.0).seen
    for each in outcomes:
        each.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_listen_is_named_by_all_at_once(monkeypatch, rank):
    """In a tree: rank 2 is the first of its host, and only rank 3 asks it anything."""
    monkeypatch.setattr(channel_tree, "MOST_IN_A_STAR", 0)
    listen = channel_setup._listen

    def refuse():
        if threading.current_thread().name == f"rank {rank}":
            return None, json.dumps({"channel": "no descriptors left", "port": 0, "addresses": []}).encode()
        return listen()

    monkeypatch.setattr(channel_setup, "_listen", refuse)
    began_s = time.monotonic()
    outcomes = form(timeout_s=60.0)
    assert time.monotonic() - began_s < 30.0
    for each in outcomes:
        assert isinstance(each, RendezvousError)
        assert each.summary == f"Rank {rank} could not listen for the other ranks."


def test_a_report_from_a_signal_handler_in_the_midst_of_sending_arrives_whole(channels):
    """Each frame has a number, and is sealed with it."""
    connection, others = channels[2]._connections[0], iter([b"inner"])
    say = connection.say

    def interrupted(kind, text):
        found = say(kind, text)
        for inner in others:  # by the handler, before the earlier message is sent
            channels[2]._send(0, Frame.BEAT, inner)
        return found

    connection.say = interrupted
    with channels[2]._lock:
        channels[2]._send(0, Frame.BEAT, b"outer")
    channels[2].report_failure(ConfigError("the reason"))
    until(lambda: channels[0].failure)
    assert "the reason" in str(channels[0].failure)


@needs_openssl
@pytest.mark.parametrize("by_hand", [True, False], ids=["close", "no references"])
def test_a_hub_that_leaves_before_a_rank_receives_that_has_left_all_the_same(monkeypatch, by_hand):
    encrypt, goes_on, counted = channel_setup._encrypt, threading.Event(), itertools.count()

    def encrypt_late(*arguments):
        if next(counted) == 0:
            assert goes_on.wait(60.0)
        return encrypt(*arguments)

    monkeypatch.setattr(channel_setup, "_encrypt", encrypt_late)
    monkeypatch.setattr(control_channel, "_LEAVE_WITHIN_S", 60.0)
    outcomes = [None] * 4
    forming = threading.Thread(target=form, kwargs={"outcomes": outcomes, "timeout_s": 20.0})
    forming.start()
    until(lambda: outcomes.count(None) == 1)
    other = next(each for each in outcomes[1:] if each is not None)
    if by_hand:
        leaving = threading.Thread(target=outcomes[0].close)
    else:
        leaving = threading.Thread(target=lambda: outcomes.__setitem__(0, None))
    leaving.start()
    until(lambda: other.left)
    goes_on.set()
    for each in (leaving, forming):
        each.join(60.0)
        assert not each.is_alive()
    for each in outcomes[1:]:
        until(lambda each=each: each.left or each.failure)
        assert each.failure is None and [member.rank for member in each.left] == [0]
    for each in outcomes[1:]:  # only now: a hub that is still about to leave passes other departures on
        each.close()


def until(is_so):
    """Wait until that is so."""
    deadline = time.monotonic() + 50.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("reason", ["not installed", "fails", "makes nothing"])
def test_a_hub_without_a_certificate_says_so_and_goes_on(reason, monkeypatch, tmp_path, caplog):
    if reason != "not installed":
        program = tmp_path / "openssl"
        program.write_text(f"#!/bin/sh\necho no entropy >&2\nexit {int(reason == 'fails')}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tls.own_certificate.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="paceline"), formed() as channels:
            assert not any(each.is_encrypted for each in channels[0]._connections.values())
            channels[3].report_failure(ValueError("the cause"))
            assert "the cause" in channels[1].wait(30.0).seen
    finally:
        tls.own_certificate.cache_clear()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("paceline: what ranks") and "not encrypted, because" in said
    assert ("not installed" if reason == "not installed" else "no entropy") in said


def ends():
    """Both ends of an encrypted connection, after their handshake."""
    hub, rank = tls.Tls(tls.own_certificate()), tls.Tls()
    rank.decrypt(b"")
    hub.decrypt(rank.encrypt(b""))
    rank.decrypt(hub.encrypt(b""))
    hub.decrypt(rank.encrypt(b""))
    assert hub.is_open and rank.is_open
    return hub, rank


@needs_openssl
@given(
    st.lists(st.tuples(st.booleans(), st.binary(max_size=40)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_what_is_encrypted_comes_out_however_it_is_cut(said, generator):
    hub, rank = ends()
    for is_of_hub, data in said:
        speaker, hearer = (hub, rank) if is_of_hub else (rank, hub)
        sent, heard = speaker.encrypt(data), b""
        assert not data or (len(sent) > len(data))
        while sent:
            cut = generator.randint(1, len(sent))
            heard += hearer.decrypt(sent[:cut])
            sent = sent[cut:]
        assert heard == data


@needs_openssl
def test_what_is_said_before_both_have_a_key_comes_afterwards():
    hub, rank = tls.Tls(tls.own_certificate()), tls.Tls()
    assert hub.encrypt(b"first, ") == b"" and hub.encrypt(b"second") == b""
    rank.decrypt(b"")
    hub.decrypt(rank.encrypt(b""))
    rank.decrypt(hub.encrypt(b""))
    assert rank.is_open and not hub.is_open
    assert hub.decrypt(rank.encrypt(b"at once")) == b"at once"
    assert rank.decrypt(hub.encrypt(b"")) == b"first, second"


@needs_openssl
def test_a_foreign_certificate_is_refused():
    own, other = tls.own_certificate(), tls.own_certificate.__wrapped__()
    assert own.fingerprint != other.fingerprint and tls.own_certificate() is own
    _, rank = ends()
    rank.check(own.fingerprint)
    with pytest.raises(ConnectionError, match="another certificate"):
        rank.check(other.fingerprint)


@needs_openssl
def test_each_changed_byte_of_what_is_encrypted_is_noticed():
    hub, rank = ends()
    sent = bytearray(hub.encrypt(b"the mean"))
    sent[-1] ^= 1
    with pytest.raises(ConnectionError, match="TLS"):
        rank.decrypt(bytes(sent))


@needs_openssl
@pytest.mark.parametrize("word", [b"GET / HTTP/1.1\r\n\r\n", bytes(100)])
def test_an_unknown_peer_who_speaks_otherwise_is_a_connection_error(word):
    with pytest.raises(ConnectionError, match="TLS"):
        tls.Tls(tls.own_certificate()).decrypt(word)


# --- the secret ---


def test_no_secret_unless_one_is_given():
    assert find_secret({}) is NO_SECRET


def test_a_private_file_holds_the_secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    found = find_secret({"PACELINE_SECRET_FILE": str(path), "PACELINE_SECRET": "another secret!!"})
    assert found.key == SECRET and str(path) in found.source and SECRET.decode() not in repr(found)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="not this user's alone") as caught:
        find_secret({"PACELINE_SECRET_FILE": str(path)})
    assert f"{mode:04o}" in caught.value.got and "chmod 600" in caught.value.hint


@pytest.mark.parametrize("path", ["/nowhere/secret", "a\0b", "/dev"])
def test_a_file_that_is_none_is_refused(path):
    with pytest.raises(ConfigError):
        find_secret({"PACELINE_SECRET_FILE": path})


def test_a_short_secret_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="too short") as caught:
        find_secret({"PACELINE_SECRET": "xyzzy"})
    assert "xyzzy" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "3", "1.5", "86400"])
def test_a_longer_silence_can_be_allowed(text):
    assert allowed_silence_s({"PACELINE_SILENCE_S": text}) == float(text or 3)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_silence_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="PACELINE_SILENCE_S"):
        allowed_silence_s({"PACELINE_SILENCE_S": text})


# --- reports of ranks ---


class Watcher:
    def __init__(self):
        self.seen, self.changed = [], threading.Condition()

    def _note(self, *what):
        with self.changed:
            self.seen.append(what)
            self.changed.notify_all()

    def take(self, rank, figures):
        self._note("report", rank, figures)

    def leave(self, rank):
        self._note("left", rank)

    def lose(self, rank):
        self._note("lost", rank)

    def wait_for(self, *what):
        with self.changed:
            assert self.changed.wait_for(lambda: what in self.seen, 30), self.seen


def test_reports_reach_only_the_hub(channels):
    watcher = Watcher()
    channels[0].watch(watcher)
    channels[1].watch(other := Watcher())
    channels[3].report(b"three")
    channels[2].report(b"x" * 5000)  # too long: dropped
    channels[0].report(b"of the hub itself")
    watcher.wait_for("report", 3, b"three")
    channels[2].close()
    watcher.wait_for("left", 2)
    kill(channels[3])
    watcher.wait_for("lost", 3)
    reports = [what for each in (watcher, other) for what in each.seen if what[0] == "report"]
    assert reports == [("report", 3, b"three")]


def test_reports_go_through_a_tree(monkeypatch):
    monkeypatch.setattr("paceline.health.channel_tree.MOST_IN_A_STAR", 2)
    channels = form()
    try:
        watcher = Watcher()
        channels[0].watch(watcher)
        channels[3].report(b"three")
        watcher.wait_for("report", 3, b"three")
    finally:
        end(channels)


def test_a_report_is_dropped_where_another_one_waits(channels):
    watcher = Watcher()
    channels[0].watch(watcher)
    with channels[3]._lock:
        channels[3]._unsent[0] = b"\0"
        before = bytes(channels[3]._unsent[0])
        channels[3].report(b"later")
        assert channels[3]._unsent[0] == before
        channels[3]._unsent[0] = b""
    channels[3].report(b"now")
    watcher.wait_for("report", 3, b"now")
    assert ("report", 3, b"later") not in watcher.seen


def test_a_rank_that_another_one_has_lost_is_gone_for_who_watches(channels):
    """The first rank to notice a death reports it; the hub may end before it sees the connection end."""
    watcher = Watcher()
    channels[0].watch(watcher)
    channels[2].report_failure(PeerLostError("Rank 3 died.", lost=(3,)))
    watcher.wait_for("lost", 3)


def test_what_the_hub_itself_has_lost_is_gone_for_who_watches(channels):
    watcher = Watcher()
    channels[0].watch(watcher)
    channels[0].report_failure(PeerLostError("Rank 1 died.", lost=(1,)))
    watcher.wait_for("lost", 1)


def reset(channels, *ranks):
    """Reset the connections of ranks, as a firewall does, or the kernel if one died with unread data.

    The hub sees all resets together, however long the threads of the others take. It sends a beat before it
    has read the state of the connections: the kernel reports an error once, to the beat.
    """
    with channels[0]._lock:
        close_by_reset(channels, *ranks)
        for rank in ranks:
            channels[0]._send(rank, Frame.BEAT, b"")


def close_by_reset(channels, *ranks):
    """Let the threads of these ranks close their connections, and the kernel reset them."""
    for rank in ranks:
        connections = list(channels[rank]._connections.values())
        for connection in connections:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        channels[rank]._is_closed = True  # from here on its thread may close them at any moment
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RD)  # which wakes its thread
    for rank in ranks:
        channels[rank]._thread.join(30.0)


def test_a_rank_whose_connection_is_reset_alone_has_died(channels):
    reset(channels, 3)
    for rank in (0, 1, 2):
        error = channels[rank].wait(30.0)
        assert error.lost == (3,) and error.summary == "Rank 3 of 4 on host node1 died."


def test_ranks_of_a_host_whose_connections_are_all_reset_are_not_said_to_have_died(channels):
    reset(channels, 2, 3)
    error = channels[1].wait(30.0)
    assert error.lost == (2, 3) and "killed" not in str(error)
    assert error.summary == "The connection to ranks 2-3 of 4 on host node1 was reset."
    assert "the network between node0 and node1" in error.likely


class Withheld:
    """A socket whose reader waits until it may read, and then reads to the end."""

    def __init__(self, link):
        self.link = link
        self.is_read, self.may_be_read, self.has_ended = (threading.Event() for _ in range(3))

    def recv(self, size):
        self.is_read.set()
        self.may_be_read.wait(60.0)
        while self.link.recv(size):
            pass
        self.has_ended.set()
        return b""

    def __getattr__(self, name):
        return getattr(self.link, name)


def test_a_reset_that_another_thread_has_met_and_not_noted_yet_is_no_death(channels):
    """A thread that sends holds the lock, and the kernel reports a reset once: here to that thread."""
    hub = channels[0]
    with hub._lock:
        link = hub._connections[2].socket = Withheld(hub._connections[2].socket)
    with channels[2]._lock:
        channels[2]._send(0, Frame.BEAT, b"")
    assert link.is_read.wait(60.0)
    with hub._lock:
        close_by_reset(channels, 2, 3)
        for rank in (2, 3):
            with pytest.raises(OSError):
                hub._connections[rank].socket.send(b"a beat")
        link.may_be_read.set()
        assert link.has_ended.wait(60.0)
        hub._reset_while_sending |= {2, 3}
    error = channels[1].wait(30.0)
    assert error.lost == (2, 3) and "killed" not in str(error)
    assert error.summary == "The connection to ranks 2-3 of 4 on host node1 was reset."


def test_ranks_of_a_host_are_asked_at_once_where_one_is_reset(channels, monkeypatch):
    """A firewall that has forgotten the connections of a host resets each one at its next segment."""
    monkeypatch.setattr(control_channel, "_RESET_GRACE_S", 3.0)  # the machine may be busy
    with channels[0]._lock:
        channels[0]._beats_at_s = math.inf  # none is due soon
    ((_, connection),) = channels[2]._connections.items()
    held = connection.socket.dup()  # is open when the thread of this rank has gone
    channels[2]._is_closed = True
    channels[2]._thread.join(30.0)

    def reset_when_something_comes():
        select.select([held], [], [], 30.0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        held.close()

    firewall = threading.Thread(target=reset_when_something_comes)
    firewall.start()
    reset(channels, 3)
    error = channels[1].wait(30.0)
    firewall.join()
    assert error.lost == (2, 3) and "was reset" in error.summary


def test_a_rank_whose_connection_is_reset_while_its_host_acknowledges_nothing_is_not_said_to_have_died(
    channels, monkeypatch
):
    """The other end of a link that is cut in one direction resets the connections that it gives up."""
    monkeypatch.setattr(control_channel, "unconfirmed_bytes", lambda _: 1000)
    for each in channels:
        each._silence_s = 1.0
    reset(channels, 3)
    for rank in (0, 1, 2):
        error = channels[rank].wait(30.0)
        assert error.lost == (3,) and "killed" not in str(error)
        assert error.summary == "The connection to rank 3 of 4 on host node1 was reset."


def test_all_connections_with_a_silent_host_end_together(channels, monkeypatch):
    """A remaining connection would receive retransmissions long after the rank there has ended."""
    with channels[0]._lock:
        monkeypatch.setattr(channels[0]._arrivals, "silent", lambda *_: [2])
        channels[0]._looks_at_s = 0.0
    for rank in (2, 3):
        error = channels[rank].wait(30.0)
        assert error.lost == (0, 1)
        assert error.summary == "Ranks 0-1 of 4 on host node0 cannot be reached any more."
    for rank in (0, 1):
        error = channels[rank].wait(30.0)
        assert error.lost == (2, 3)
        assert error.summary == "Ranks 2-3 of 4 on host node1 cannot be reached any more."


def test_no_kernel_gives_up_a_connection_before_its_host_counts_as_silent(channels):
    """By itself it would, after some ten probes, while other connections show that the host is alive."""
    for each in channels:
        for connection in each._connections.values():
            gives_up_ms = connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert gives_up_ms > 1000 * 3600


def test_an_end_that_gives_up_says_why(channels):
    with channels[3]._lock:
        channels[3]._lose(0, How.SILENT)
    error = channels[1].wait(30.0)
    assert (
        error.lost == (2, 3) and error.summary == "Ranks 2-3 of 4 on host node1 cannot be reached any more."
    )
    assert "it gave up, because one of the two hosts hears nothing from the other" in error.seen
    assert channels[3].wait(30.0).lost == (0, 1)
