"""Length-prefixed messages over a local stream socket, each with a deadline.

A frame is a kind (one byte), a length (eight bytes, little-endian) and that many bytes. Nothing is
unpickled, and a length beyond the limit ends the connection instead of filling the memory.
"""

from __future__ import annotations

import os
import socket
import struct
from enum import IntEnum

from paceline.errors import RendezvousError
from paceline.rendezvous.deadline import Deadline

_HEAD = struct.Struct("<BQ")
_CREDENTIALS = struct.Struct("3i")
_LONGEST_FRAME = 1 << 30


class Frame(IntEnum):
    """What a frame holds: its first byte."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    PAYLOAD = 4
    ALL_PAYLOADS = 5
    FAILED = 6


def send_frame(peer: socket.socket, kind: Frame, payload: bytes, deadline: Deadline) -> None:
    """Raises OSError (TimeoutError at the deadline) when the peer does not take it."""
    peer.settimeout(max(deadline.left_s(), 1e-3))
    peer.sendall(_HEAD.pack(kind, len(payload)) + payload)


def receive_frame(peer: socket.socket, deadline: Deadline) -> tuple[Frame, bytes]:
    """Raises OSError (TimeoutError at the deadline, ConnectionError at an early end)."""
    kind, length = _HEAD.unpack(_receive_exactly(peer, _HEAD.size, deadline))
    if length > _LONGEST_FRAME or kind not in Frame.__members__.values():
        raise ConnectionError("the other end does not speak Paceline's protocol")
    return Frame(kind), _receive_exactly(peer, length, deadline)


def _receive_exactly(peer: socket.socket, length: int, deadline: Deadline) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        peer.settimeout(max(deadline.left_s(), 1e-3))
        chunk = peer.recv(min(length - len(chunks), 1 << 20))
        if not chunk:
            raise ConnectionError("the other end closed the connection")
        chunks += chunk
    return bytes(chunks)


def peer_pid(peer: socket.socket) -> int:
    """Process at the other end. Only processes of the same user may speak with us.

    Raises:
        RendezvousError: The other end belongs to another user.
    """
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise RendezvousError(
            f"A process of another user (uid {uid}, pid {pid}) tried to join this job.",
            expected=f"uid {os.getuid()}",
            got=f"uid {uid}",
            hint="start all ranks as the same user",
        )
    return int(pid)


def listen(address: str, backlog: int) -> socket.socket:
    """Listen on an abstract Unix address: it has no file, so nothing is left behind. "" picks a free one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind("\0" + address if address else "")
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener
