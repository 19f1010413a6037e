"""Sockets on which ranks connect, among silent connections; and a queue that is full."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.errors import RendezvousError
from paceline.rendezvous.acceptor import Acceptor
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.descriptors import DescriptorServer, take_descriptor
from paceline.rendezvous.frames import Frame, connect_local, frame, listen, receive_frame, send_frame

WITHIN_S = 60
Dial = Callable[[str], socket.socket]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Connections that are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda address: stack.enter_context(connect_local(address, WITHIN_S))


def address_of(listener: socket.socket) -> str:
    return listener.getsockname()[1:].decode()


def test_the_oldest_of_too_many_silent_connections_is_asked_to_come_again(dial: Dial) -> None:
    with listen("") as listener, Acceptor(listener, 1, 100, lambda _: "hello") as acceptor:
        silent = [dial(address_of(listener)) for _ in range(70)]
        speaker = dial(address_of(listener))
        send_frame(speaker, Frame.HELLO, b"it is me", Deadline(WITHIN_S))
        (caller,) = acceptor.poll(WITHIN_S)
        with caller.peer:
            assert (caller.greeting, caller.kind, caller.raw) == ("hello", Frame.HELLO, b"it is me")
        for dropped in silent[:5]:
            assert receive_frame(dropped, Deadline(WITHIN_S)) == (Frame.FULL, b"")
        send_frame(silent[-1], Frame.HELLO, b"at last", Deadline(WITHIN_S))
        (caller,) = acceptor.poll(WITHIN_S)
        with caller.peer:
            assert caller.raw == b"at last"


def test_a_connect_waits_for_a_place_in_a_full_queue(dial: Dial) -> None:
    with listen("", 0) as listener:
        address = address_of(listener)
        dial(address)
        with pytest.raises(BlockingIOError):
            connect_local(address, 0.01)
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept()[0]))
        accepting.start()
        dial(address)
        accepting.join()
        accepted[0].close()


def test_a_signal_during_the_wait_for_a_place_makes_no_connection(dial: Dial) -> None:
    """Python would take the socket for connected."""
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(time.monotonic()))
    try:
        with listen("", 0) as listener:
            dial(address_of(listener))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(BlockingIOError):
                connect_local(address_of(listener), WITHIN_S)
            assert came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_descriptor_among_silent_connections(dial: Dial) -> None:
    fd = os.memfd_create("handed-out")
    try:
        with DescriptorServer(2) as server:
            name = server.address.partition("/")[0]
            held = [dial(name) for _ in range(300)]
            server.serve(fd)
            for _ in range(3):
                taken = take_descriptor(server.address, Deadline(WITHIN_S), 0)
                assert os.path.sameopenfile(fd, taken)
                assert not os.get_inheritable(taken)
                os.close(taken)
            assert receive_frame(held[0], Deadline(WITHIN_S)) == (Frame.FULL, b"")
    finally:
        os.close(fd)


def test_a_rank_that_is_asked_to_come_again_gets_the_descriptor_then() -> None:
    fd = os.memfd_create("handed-out")
    try:
        with listen("") as listener:

            def serve() -> None:
                for is_first in (True, False):
                    peer, _ = listener.accept()
                    with peer:
                        receive_frame(peer, Deadline(WITHIN_S))
                        if is_first:
                            send_frame(peer, Frame.FULL, b"", Deadline(WITHIN_S))
                        else:
                            socket.send_fds(peer, [frame(Frame.WELCOME, b"")], [fd])

            server = threading.Thread(target=serve, daemon=True)
            server.start()
            taken = take_descriptor(f"{address_of(listener)}/key", Deadline(WITHIN_S), 0)
            server.join()
            assert os.path.sameopenfile(fd, taken)
            os.close(taken)
    finally:
        os.close(fd)


def test_a_descriptor_is_for_those_who_know_the_key() -> None:
    fd = os.memfd_create("handed-out")
    try:
        with DescriptorServer(2) as server:
            server.serve(fd)
            name, _, key = server.address.partition("/")
            for wrong in ("", "0" * len(key), key[:-1], key + "0"):
                with pytest.raises((RendezvousError, OSError)):
                    take_descriptor(f"{name}/{wrong}", Deadline(WITHIN_S), 0)
    finally:
        os.close(fd)


def test_a_flood_is_named_at_the_deadline(dial: Dial) -> None:
    with listen("", 0) as listener:
        dial(address_of(listener))
        with pytest.raises(RendezvousError) as caught:
            take_descriptor(f"{address_of(listener)}/key", Deadline(0.2), 3)
    assert "Rank 3 could not be asked for its memory" in str(caught.value)
    assert "full of other connections" in caught.value.seen
    assert "connects to this socket without end" in caught.value.likely
    assert "ss -xlp" in caught.value.hint
