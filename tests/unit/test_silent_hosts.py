"""Signs of life of another host. `tests/hosts/test_failures.py` has links that are cut, and slow ones."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

import pytest

from paceline.health import silent_hosts
from paceline.health.silent_hosts import Arrivals, quiet_s, unconfirmed_bytes

SILENCE_S = 3.0
HOSTS = ((0, 1), (2, 3))


@contextlib.contextmanager
def connected(family: int, server: str, client: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection's two ends; the first was accepted by a program that no longer listens."""
    with (
        socket.socket(family) as listener,
        socket.socket(family if ":" in client else socket.AF_INET) as other,
    ):
        listener.bind((server, 0))
        listener.listen()
        other.connect((client, listener.getsockname()[1]))
        one, _ = listener.accept()
        listener.close()
        with one:
            yield one, other


@pytest.fixture(params=["version 4", "version 6", "version 4 in 6"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    addresses = {
        "version 4": (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        "version 6": (socket.AF_INET6, "::1", "::1"),
        "version 4 in 6": (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    }
    try:
        with connected(*addresses[request.param]) as both:
            yield both
    except OSError as error:
        pytest.skip(f"no IPv6: {error}") if request.param != "version 4" else pytest.fail(str(error))


def seen(connection: socket.socket, seconds: float) -> list[list[int]]:
    """The silent hosts, at looks in the given time, by a clock that does not wait."""
    now = time.monotonic()
    watched = Arrivals({3: connection}, HOSTS, now)
    found = [watched.silent(SILENCE_S, now + step / 4) for step in range(1, round(4 * seconds))]
    watched.forget(3)
    return found


@pytest.fixture
def is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """No new connection is answered."""
    monkeypatch.setattr(silent_hosts._Trial, "is_answered", lambda _: False)


def test_a_host_that_refuses_a_new_connection_is_there(ends: tuple[socket.socket, socket.socket]) -> None:
    assert not any(seen(ends[0], 20.0))


def test_an_address_without_a_route_does_not_answer() -> None:
    """Like every other host if the network interface is switched off: no connection begins."""
    trial = silent_hosts._Trial(socket.AF_INET, ("255.255.255.255", 9), time.monotonic())
    assert not trial.is_answered()
    trial.close()


def test_no_descriptor_for_a_new_connection_is_no_answer(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", refuse)
    assert [3] in seen(ends[0], 4.0)


@pytest.mark.usefixtures("is_cut")
def test_nothing_comes(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_hosts, "_segments_from", lambda _: {})
    found = seen(ends[0], 4.0)
    assert [3] in found and found.index([3]) == 4 * SILENCE_S - 1  # the look after three seconds


@pytest.mark.usefixtures("is_cut")
def test_what_comes_over_the_connection_counts(ends: tuple[socket.socket, socket.socket]) -> None:
    now = time.monotonic()
    watched = Arrivals({3: ends[0]}, HOSTS, now)
    for second in range(1, 20):
        ends[1].send(b"x")
        ends[0].recv(1)
        assert not watched.silent(SILENCE_S, now + second)


@pytest.mark.usefixtures("is_cut")
def test_what_comes_over_another_connection_counts(ends: tuple[socket.socket, socket.socket]) -> None:
    now = time.monotonic()
    watched = Arrivals({3: ends[0]}, HOSTS, now)
    address = ends[0].getpeername()[0]
    plain = address.removeprefix("::ffff:")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    with connected(family, plain, plain) as (one, other):
        for step in range(1, 80):
            other.send(b"x")
            one.recv(1)
            assert not watched.silent(SILENCE_S, now + step / 4)
    watched.forget(3)


@pytest.mark.usefixtures("is_cut")
def test_what_comes_from_one_rank_is_a_sign_of_life_of_its_host(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a host are lost together, or none is."""
    monkeypatch.setattr(silent_hosts, "_segments_from", lambda _: {})
    now = time.monotonic()
    with connected(socket.AF_INET, "127.0.0.1", "127.0.0.1") as (beside, _):
        watched = Arrivals({2: beside, 3: ends[0]}, HOSTS, now)
        for second in range(1, 9):
            ends[1].send(b"x")
            ends[0].recv(1)
            assert not watched.silent(SILENCE_S, now + second)
        found = [watched.silent(SILENCE_S, now + 8 + step / 4) for step in range(1, 16)]
        assert [2, 3] in found and all(each in ([], [2, 3]) for each in found)
        for rank in (2, 3):
            watched.forget(rank)


@pytest.mark.usefixtures("is_cut")
def test_a_silence_begins_when_the_last_data_came(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's clock, and not at the look that has seen them."""
    monkeypatch.setattr(silent_hosts, "_segments_from", lambda _: {})
    now = time.monotonic()
    watched = Arrivals({3: ends[0]}, HOSTS, now)
    ends[1].send(b"x")
    ends[0].recv(1)
    monkeypatch.setattr(silent_hosts, "quiet_s", lambda _: 0.2)
    assert not watched.silent(SILENCE_S, now + 1.0)
    assert watched.judged_at_s(SILENCE_S) == pytest.approx(now + 0.8 + SILENCE_S)
    watched.forget(3)
    assert watched.judged_at_s(SILENCE_S) == float("inf")


@pytest.mark.usefixtures("is_cut")
def test_a_process_that_could_not_look_for_long_looks_first(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_hosts, "_segments_from", lambda _: {})
    now = time.monotonic()
    watched = Arrivals({3: ends[0]}, HOSTS, now)
    assert not watched.silent(SILENCE_S, now + 60.0)
    watched.forget(3)


def test_a_connection_that_is_forgotten_is_not_looked_at(ends: tuple[socket.socket, socket.socket]) -> None:
    now = time.monotonic()
    watched = Arrivals({3: ends[0]}, HOSTS, now)
    watched.forget(3)
    assert not watched.silent(SILENCE_S, now + 60.0)


def test_for_how_long_nothing_has_come(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].send(b"x")
    ends[0].recv(1)
    assert quiet_s(ends[0]) < 60.0
    ends[0].close()
    assert quiet_s(ends[0]) == 0.0


def test_what_the_other_kernel_has_acknowledged(ends: tuple[socket.socket, socket.socket]) -> None:
    """Also for a process that reads nothing, as far as there is room for it."""
    ends[0].send(b"x" * 100)
    until_s = time.monotonic() + 60
    while unconfirmed_bytes(ends[0]):
        assert time.monotonic() < until_s
    ends[0].setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ends[0].send(b"x" * (1 << 20))
    assert unconfirmed_bytes(ends[0]) > 0
