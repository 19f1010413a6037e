"""Accepts the connections of a listening socket, and reads the first frame of each.

Every process that reaches the socket can connect to it, as often as it wants, and send nothing. So no single
connection is waited for: the queue is emptied at once, processes of other users are rejected first, and if
too many connections are silent, the oldest one is asked to retry.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.errors import RendezvousError
from paceline.rendezvous.frames import Frame, FrameReader, check_same_user, frame
from paceline.rendezvous.resource_limits import OUT_OF_ROOM

T = TypeVar("T")

RETRY_S = 0.01
"""Seconds after which a client that found no room retries."""
FLOODED = "another process, perhaps of another user, connects to this socket without end"
FLOODED_HINT = (
    "`ss -xlp` shows sockets whose queue is full, and `ss -xp` who has connected; end that process, or start "
    "the job in a network namespace of its own (a container, `unshare -rn`)"
)
_MOST_UNKNOWN_PEERS = 64
_AT_ONCE = 256


@dataclass(frozen=True)
class Caller(Generic[T]):
    peer: socket.socket
    greeting: T
    kind: Frame
    raw: bytes


class Acceptor(Generic[T]):
    """The connections to a listening socket that have not sent their first frame. Not for several threads."""

    def __init__(
        self, listener: socket.socket, expected: int, longest: int, greet: Callable[[socket.socket], T]
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._most_silent = expected + _MOST_UNKNOWN_PEERS
        self._longest, self._greet = longest, greet
        self._is_local = listener.family == socket.AF_UNIX
        # The oldest first. PollSelector needs no file descriptor.
        self._silent: dict[socket.socket, tuple[T, FrameReader]] = {}
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self.num_unknown_peers = 0
        self.no_room: OSError | None = None

    def __enter__(self) -> Acceptor[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for peer in self._silent:
            peer.close()
        self._silent.clear()
        self._selector.close()

    def poll(self, timeout_s: float | None) -> Iterator[Caller[T]]:
        """Connections whose first frame has arrived; waits up to `timeout_s` until something arrives.

        Yields nothing, at once, when the listener is shut down.
        """
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        for peer in ready:
            if peer in self._silent:  # neither the listener, nor dropped meanwhile
                yield from self._read(peer)
        if self._listener in ready:
            yield from self._accept()

    def _accept(self) -> Iterator[Caller[T]]:
        for _ in range(_AT_ONCE):
            try:
                peer, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_ROOM and not self._drop_oldest():
                    self.no_room = error
                    time.sleep(RETRY_S)
                return  # or the caller has disconnected already
            self.no_room = None
            if not self._is_welcome(peer):
                peer.close()
                continue
            if len(self._silent) >= self._most_silent:
                self._drop_oldest()
            peer.setblocking(False)
            self._silent[peer] = self._greet(peer), FrameReader(self._longest)
            self._selector.register(peer, selectors.EVENT_READ)
            yield from self._read(peer)  # a rank sends its first frame at once

    def _is_welcome(self, peer: socket.socket) -> bool:
        if not self._is_local:
            return True
        try:
            check_same_user(peer)
        except (OSError, RendezvousError):
            self.num_unknown_peers += 1
            return False
        return True

    def _drop_oldest(self) -> bool:
        for peer in self._silent:
            with contextlib.suppress(OSError):
                peer.send(frame(Frame.FULL, b""))
            self._forget(peer)
            peer.close()
            return True
        return False

    def _forget(self, peer: socket.socket) -> T:
        self._selector.unregister(peer)
        return self._silent.pop(peer)[0]

    def _read(self, peer: socket.socket) -> Iterator[Caller[T]]:
        _, reader = self._silent[peer]
        try:
            piece = peer.recv(reader.wants)
            first = reader.feed(piece)
        except BlockingIOError:
            return
        except OSError:
            piece, first = b"", None
        if first is not None:
            yield Caller(peer, self._forget(peer), *first)
        elif not piece:
            self._forget(peer)
            peer.close()
