"""Connections that end: the other side receives all earlier data, whatever it sends meanwhile."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from paceline.health import exit_reports
from paceline.health.connections import close_once_arrived, shut_down, wait_until_arrived

NBYTES = 400_000


@contextlib.contextmanager
def two_ends():
    """A connection whose second end accepts little data before a thread reads there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one = socket.create_connection(server.getsockname())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * NBYTES)
        other, _ = server.accept()
    with one, other:
        yield one, other


def everything_from(connection: socket.socket) -> int:
    found = 0
    with contextlib.suppress(ConnectionResetError):
        while received := connection.recv(1 << 16):
            found += len(received)
    return found


def test_a_connection_that_is_just_closed_forgets_what_was_sent():
    with two_ends() as (one, other):
        one.sendall(bytes(NBYTES))
        other.send(b"what comes next?")
        one.close()
        assert everything_from(other) < NBYTES


def test_what_was_sent_arrives():
    with two_ends() as (one, other):
        one.sendall(bytes(NBYTES))
        began_s = time.monotonic()
        close_once_arrived([one])
        assert time.monotonic() - began_s < 0.5
        other.send(b"what comes next?")
        assert everything_from(other) == NBYTES


def test_the_end_of_the_process_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exit_reports, "close_all", lambda: None)
    with two_ends() as (one, other):
        one.sendall(bytes(NBYTES))
        close_once_arrived([one])
        other.setblocking(False)
        found = 0
        while found < NBYTES - 100_000:
            with contextlib.suppress(BlockingIOError):
                found += len(other.recv(1 << 14))
        assert one.fileno() >= 0
        other.setblocking(True)
        reading = threading.Timer(0.3, everything_from, (other,))
        reading.start()
        exit_reports._end()
        assert one.fileno() < 0
        reading.join()


def test_a_connection_that_has_ended_is_not_waited_for():
    with two_ends() as (one, other):
        one.sendall(bytes(NBYTES))
        shut_down([one])
        other.close()
        began_s = time.monotonic()
        wait_until_arrived([one])
        close_once_arrived([one])
        assert time.monotonic() - began_s < 5
