"""Length-prefixed messages over a stream socket.

A frame is a kind (one byte), a length (eight bytes, little-endian) and that many bytes.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from enum import IntEnum

from paceline.errors import RendezvousError
from paceline.rendezvous.deadline import Deadline

_HEAD = struct.Struct("<BQ")
_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")
_LONGEST_FRAME = 1 << 30
QUEUE = 4096  # the kernel allows at most net.core.somaxconn, which has the same default
LONGEST_HELLO = 1 << 16


class Frame(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    PAYLOAD = 4
    ALL_PAYLOADS = 5
    FAILED = 6
    CHALLENGE = 7
    BEAT = 8
    DIED = 9
    LEFT = 10
    FIGURES = 11
    ASK = 12
    ANSWER = 13
    SEEN = 14
    FULL = 15  # too many connections wait: retry
    GAVE_UP = 16  # the sender drops this connection, over which nothing arrives


def frame(kind: Frame, payload: bytes) -> bytes:
    return _HEAD.pack(kind, len(payload)) + payload


def send_frame(peer: socket.socket, kind: Frame, payload: bytes, deadline: Deadline) -> None:
    """Raises OSError (TimeoutError at the deadline) if the peer does not receive it."""
    peer.settimeout(max(deadline.left_s(), 1e-3))
    peer.sendall(frame(kind, payload))


def receive_frame(
    peer: socket.socket, deadline: Deadline, longest: int = _LONGEST_FRAME
) -> tuple[Frame, bytes]:
    """Raises OSError (TimeoutError at the deadline, ConnectionError at an early end)."""
    kind, length = _read_head(_receive_exactly(peer, _HEAD.size, deadline), longest)
    return kind, _receive_exactly(peer, length, deadline)


class FrameStream:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[tuple[Frame, bytes]]:
        """The frames that are complete now. Raises ConnectionError if the bytes cannot become a frame."""
        self._bytes += piece
        found = []
        while len(self._bytes) >= _HEAD.size:
            kind, length = _read_head(bytes(self._bytes[: _HEAD.size]), self._longest)
            end = _HEAD.size + length
            if len(self._bytes) < end:
                break
            found.append((kind, bytes(self._bytes[_HEAD.size : end])))
            del self._bytes[:end]
        return found


class FrameReader:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._bytes = bytearray()

    @property
    def wants(self) -> int:
        return _HEAD.size + self._longest + 1 - len(self._bytes)

    def feed(self, piece: bytes) -> tuple[Frame, bytes] | None:
        """The frame once it is complete, else None. Raises ConnectionError if the bytes cannot become one."""
        self._bytes += piece
        if len(self._bytes) < _HEAD.size:
            return None
        kind, length = _read_head(bytes(self._bytes[: _HEAD.size]), self._longest)
        if len(self._bytes) < _HEAD.size + length:
            return None
        if len(self._bytes) > _HEAD.size + length:
            raise ConnectionError("the other end says more than it may")
        return kind, bytes(self._bytes[_HEAD.size :])


def _read_head(head: bytes, longest: int) -> tuple[Frame, int]:
    kind, length = _HEAD.unpack(head)
    if length > longest or kind not in Frame.__members__.values():
        raise ConnectionError("the other end does not speak Paceline's protocol")
    return Frame(kind), length


def _receive_exactly(peer: socket.socket, length: int, deadline: Deadline) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        peer.settimeout(max(deadline.left_s(), 1e-3))
        chunk = peer.recv(min(length - len(chunks), 1 << 20))
        if not chunk:
            raise ConnectionError("the other end closed the connection")
        chunks += chunk
    return bytes(chunks)


def peer_credentials(peer: socket.socket) -> tuple[int, int]:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def check_same_user(peer: socket.socket) -> None:
    """Raise unless the peer is a process of the same user."""
    pid, uid = peer_credentials(peer)
    if uid != os.getuid():
        raise RendezvousError(
            f"A process of another user (uid {uid}, pid {pid}) tried to join this job.",
            expected=f"uid {os.getuid()}",
            got=f"uid {uid}",
            hint="start all ranks as the same user",
        )


def listen(address: str, backlog: int = QUEUE) -> socket.socket:
    """Listen on an abstract Unix address: it has no file, so nothing is left behind. "" picks a free one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind("\0" + address if address else "")
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect_local(address: str, timeout_s: float) -> socket.socket:
    """Connect to an abstract Unix address; waits at most `timeout_s` for room in the listener's queue.

    Raises:
        BlockingIOError: The queue was full all the time.
        OSError: No process listens there, or this process can open no socket.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # A blocking connect(), which the kernel wakes when there is room. One that does not block fails at
        # once if the queue is full, and retrying would seldom win a place while others flood the socket.
        peer.settimeout(None)
        whole, micros = divmod(max(int(timeout_s * 1e6), 1000), 1_000_000)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, micros))
        peer.connect("\0" + address)
        _check_connected(peer)
    except BaseException:
        peer.close()
        raise
    return peer


def _check_connected(peer: socket.socket) -> None:
    """Python takes a socket for connected if a signal ended connect() while it waited in the queue."""
    try:
        peer.getpeername()
    except OSError as error:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
