"""Accepts the connections of a listening socket, and reads the first frame of each.

Every process that reaches the socket can connect to it, as often as it wants, and say nothing. So nobody is
waited for: the queue is emptied at once, processes of other users are turned away first of all, and where
too many connections are silent, the oldest is told to come again. A rank that was told so does.
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
from paceline.rendezvous.limits import OUT_OF_ROOM

T = TypeVar("T")

RETRY_S = 0.01
"""After how long whoever found no room tries again."""
FLOODED = "another process, perhaps of another user, connects to this socket without end"
FLOODED_HINT = (
    "`ss -xlp` shows sockets whose queue is full, and `ss -xp` who has connected; end that process, or start "
    "the job in a network namespace of its own (a container, `unshare -rn`)"
)
_MOST_UNKNOWN_PEERS = 64
_AT_ONCE = 256


@dataclass(frozen=True)
class Caller(Generic[T]):
    """A connection and the first frame that came on it.

    Attributes:
        peer: The connection, which is the receiver's to close.
        greeting: What `greet` returned for it.
        kind, raw: The frame.
    """

    peer: socket.socket
    greeting: T
    kind: Frame
    raw: bytes


class Acceptor(Generic[T]):
    """The connections to a listening socket that have not said their first frame. Not for several threads.

    Args:
        listener: The socket, which stays the caller's. On a Unix address only processes of this user may
            connect.
        expected: How many connections are expected; 64 more may be silent at a time.
        longest: Bytes that a first frame may hold.
        greet: Called with each new connection.

    Attributes:
        num_unknown_peers: How many connections of other users were turned away.
        no_room: Why the last connection could not be accepted, if this process has no descriptor left.

    Example:
        A process of another user connects 10,000 times, one of this user 100 times, and rank 1 says HELLO:
        the first are closed, the oldest of the second get FULL, and `poll` returns the connection of rank 1.
    """

    def __init__(
        self, listener: socket.socket, expected: int, longest: int, greet: Callable[[socket.socket], T]
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._most_silent = expected + _MOST_UNKNOWN_PEERS
        self._longest, self._greet = longest, greet
        self._is_local = listener.family == socket.AF_UNIX
        # The oldest first. PollSelector needs no descriptor of its own.
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
        """Close the connections that are silent."""
        for peer in self._silent:
            peer.close()
        self._silent.clear()
        self._selector.close()

    def poll(self, timeout_s: float | None) -> Iterator[Caller[T]]:
        """Those whose first frame is there; waits until something comes, but no longer than given.

        Yields nothing, at once, when the listener is shut down.
        """
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        for peer in ready:
            if peer in self._silent:  # neither the listener, nor dropped meanwhile
                yield from self._read(peer)
        if self._listener in ready:
            yield from self._accept()

    def _accept(self) -> Iterator[Caller[T]]:
        """Empty the queue, as far as that does not keep those waiting who have been accepted."""
        for _ in range(_AT_ONCE):
            try:
                peer, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_ROOM and not self._drop_oldest():
                    self.no_room = error
                    time.sleep(RETRY_S)
                return  # or the caller has gone again
            self.no_room = None
            if not self._is_welcome(peer):
                peer.close()
                continue
            if len(self._silent) >= self._most_silent:
                self._drop_oldest()
            peer.setblocking(False)
            self._silent[peer] = self._greet(peer), FrameReader(self._longest)
            self._selector.register(peer, selectors.EVENT_READ)
            yield from self._read(peer)  # a rank speaks at once

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
        """End the connection that has been silent for longest; whether there was any."""
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
        """The caller, once its frame is whole."""
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
