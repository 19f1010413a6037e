"""The membership store that ranks use before a framework has a store: all ranks read what one writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.rendezvous.membership_store import MembershipClient, MembershipServer

WITHIN_S = 30.0
WORLD_SIZE = 2
Connect = Callable[[], MembershipClient]


@pytest.fixture
def server() -> Iterator[MembershipServer]:
    server = MembershipServer(0, WORLD_SIZE)
    yield server
    server.close()


@pytest.fixture
def connect(server: MembershipServer) -> Iterator[Callable[[], MembershipClient]]:
    with contextlib.ExitStack() as connections:

        def make() -> MembershipClient:
            client = MembershipClient("127.0.0.1", server.port, WITHIN_S)
            connections.callback(client.close)
            return client

        yield make


def test_what_one_writes_all_read(connect: Connect) -> None:
    one, other = connect(), connect()
    assert other.read("a") is None
    one.write("a", 'words "quoted", \u00e9, \udcff\n and a second line')
    assert other.read("a") == 'words "quoted", \u00e9, \udcff\n and a second line'
    other.write("a", "later")
    assert one.read("a") == "later"


def test_counters_count_each_once(connect: Connect) -> None:
    found: list[int] = []

    def count() -> None:
        client = connect()
        found.extend(client.add("n", 1) for _ in range(50))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert sorted(found) == list(range(1, 401))


def test_an_answer_that_is_late_is_not_that_of_the_next_request() -> None:
    goes_on = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            goes_on.wait(WITHIN_S)
            with contextlib.suppress(OSError):
                connection.sendall(b'"late"\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve)
        serving.start()
        client = MembershipClient("127.0.0.1", listener.getsockname()[1], 0.05)
        with pytest.raises(RuntimeError, match="timed out"):
            client.read("first")
        goes_on.set()
        serving.join(WITHIN_S)
        with pytest.raises(RuntimeError, match="Bad file descriptor"):
            client.read("second")


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n",
        b'["add", "n"]\n',
        b'["add", "n", "1"]\n',
        b'["write", 1, "x"]\n',
        b"[" * 40_000 + b"\n",
        b"x" * 200_000,
        b"\xff\xfe\n",
    ],
)
def test_only_an_unknown_peer_is_turned_away(
    server: MembershipServer, connect: Connect, words: bytes
) -> None:
    client = connect()
    with socket.create_connection(("127.0.0.1", server.port), WITHIN_S) as unknown_peer:
        try:
            unknown_peer.sendall(words)
            assert unknown_peer.recv(1) == b""
        except ConnectionError:
            pass  # it was turned away before it had sent all
    assert client.add("n", 1) == 1


def test_memory_has_a_bound(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.rendezvous.membership_store._MOST_BYTES", 10_000)
    client = connect()
    client.write("a", "x" * 8_000)
    client.write("a", "known")  # in place of it
    client.write("b", "x" * 8_000)
    for fill in (lambda each: each.write("c", "x" * 2_000), lambda each: each.add("c" * 2_000, 1)):
        with pytest.raises(RuntimeError, match="closed the connection"):
            fill(connect())
    assert connect().read("a") == "known"


def test_an_emoji_counts_for_the_memory_that_its_text_takes(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bytes for each character, the others too."""
    monkeypatch.setattr("paceline.rendezvous.membership_store._MOST_BYTES", 10_000)
    with pytest.raises(RuntimeError, match="closed the connection"):
        connect().write("a", "x" * 4_000 + "\U0001f6a8")


def test_unknown_peers_take_no_descriptors_that_the_process_needs(
    server: MembershipServer, connect: Connect
) -> None:
    """However many connect: silent connections are closed, the oldest first, and no rank is."""
    ranks = [connect() for _ in range(WORLD_SIZE)]
    for rank in ranks:
        rank.add("n", 1)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as unknown_peers:
        for _ in range(300):
            address = ("127.0.0.1", server.port)
            unknown_peers.enter_context(socket.create_connection(address, WITHIN_S))
        assert ranks[0].add("n", 1) == WORLD_SIZE + 1
        assert connect().add("n", 1) == WORLD_SIZE + 2  # all before this one have been accepted
        assert len(os.listdir("/proc/self/fd")) - before <= 300 + WORLD_SIZE + 64
        assert ranks[1].read("n") is None


def test_unknown_peers_that_ask_leave_no_room_for_more(server: MembershipServer, connect: Connect) -> None:
    unknown_peers = [connect() for _ in range(WORLD_SIZE + 64)]
    for unknown_peer in unknown_peers:
        unknown_peer.read("a")
    with pytest.raises(RuntimeError):
        connect().read("a")
    assert unknown_peers[0].read("a") is None


def test_a_server_that_ends_is_reported(server: MembershipServer, connect: Connect) -> None:
    client = connect()
    server.close()
    with pytest.raises(RuntimeError):
        client.read("a")
    with pytest.raises(OSError):
        connect()


def test_one_listens_at_a_port(server: MembershipServer) -> None:
    with pytest.raises(OSError):
        MembershipServer(server.port, WORLD_SIZE)


def test_a_server_that_answers_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = MembershipClient("127.0.0.1", listener.getsockname()[1], WITHIN_S)
        accepted, _ = listener.accept()
        with accepted, contextlib.closing(client):
            accepted.sendall(b"HTTP/1.1 400 Bad Request\n")
            with pytest.raises(RuntimeError, match="no membership store of Paceline's"):
                client.read("a")


def test_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = MembershipClient("127.0.0.1", listener.getsockname()[1], 0.05)
        with contextlib.closing(client), pytest.raises(RuntimeError, match="timed out"):
            client.read("a")


def test_a_forked_child_does_not_hold_the_port() -> None:
    server = MembershipServer(0, WORLD_SIZE)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, b"x")
        time.sleep(WITHIN_S)
        os._exit(0)
    try:
        os.read(reading, 1)  # the child has finished its work after the fork
        server.close()
        MembershipServer(server.port, WORLD_SIZE).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_request_is_one_line_of_json(server: MembershipServer) -> None:
    """The request of the docs, sent in chunks."""
    with socket.create_connection(("127.0.0.1", server.port), WITHIN_S) as client:
        client.sendall(b'["add", "n", 2]\n["re')
        with client.makefile("rb") as answers:
            assert json.loads(answers.readline()) == 2
            client.sendall(b'ad", "n"]\n')
            assert json.loads(answers.readline()) is None
