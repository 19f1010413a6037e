"""Sends descriptors of unnamed files from one rank to the others of its host, over abstract Unix sockets.

A rank proves that it belongs to the job with a key from the exchange between the ranks, and gets the
descriptor at once.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hmac
import logging
import os
import secrets
import socket
import threading
import time

from paceline.errors import RendezvousError
from paceline.rendezvous.acceptor import FLOODED, FLOODED_HINT, RETRY_S, Acceptor, Caller
from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.frames import (
    LONGEST_HELLO,
    Frame,
    FrameReader,
    check_same_user,
    connect_local,
    frame,
    listen,
    send_frame,
)
from paceline.rendezvous.resource_limits import start_thread
from paceline.rendezvous.shared_memory_failure import SharedMemoryFailure

_log = logging.getLogger("paceline")

_KEY_BYTES = 16
_TRY_S = 0.5
SHARE_OF_TAKING = 0.8
"""The part of a group's remaining time in which ranks take descriptors; in the rest they report failures."""
_WARN_AFTER_S = 10.0


class DescriptorServer:
    """Hands out a descriptor: a socket, and a thread that serves it until the server closes."""

    def __init__(self, world_size: int) -> None:
        self.address = ""
        self.reason = SharedMemoryFailure()
        self._world_size = world_size
        self._key = secrets.token_hex(_KEY_BYTES)
        self._is_closed = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        try:
            self._listener = listen("")
            self.address = f"{self._listener.getsockname()[1:].decode('ascii')}/{self._key}"
        except OSError as error:
            self.reason = SharedMemoryFailure.of_system(error, "open a socket")
            if not self.reason.is_limit:
                raise

    def serve(self, fd: int) -> None:
        """Send `fd` to the ranks that ask. It stays the caller's, and must stay open meanwhile."""
        thread = threading.Thread(target=self._hand_out, args=(fd,), name="paceline-server", daemon=True)
        start_thread(thread)
        self._thread = thread

    def _hand_out(self, fd: int) -> None:
        assert self._listener is not None
        with Acceptor(self._listener, self._world_size, len(self._key), lambda _: None) as acceptor:
            while not self._is_closed:
                for caller in acceptor.poll(None):
                    with caller.peer, contextlib.suppress(OSError):
                        self._answer(caller, fd)

    def _answer(self, caller: Caller[None], fd: int) -> None:
        if caller.kind is not Frame.HELLO or not hmac.compare_digest(caller.raw, self._key.encode()):
            caller.peer.send(frame(Frame.REFUSED, b"it was not given this rank's key"))
            return
        try:
            socket.send_fds(caller.peer, [frame(Frame.WELCOME, b"")], [fd])
        except OSError as error:
            caller.peer.send(frame(Frame.REFUSED, f"could not send it: {error}".encode()))

    def __enter__(self) -> DescriptorServer:
        return self

    def close(self) -> None:
        if self._listener is None:
            return
        # shutdown() wakes a thread that waits for connections; close() alone does not, and frees the number.
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def take_descriptor(address: str, deadline: Deadline, rank: int) -> int:
    """The descriptor that the server at this address hands out.

    Raises:
        RendezvousError: That rank refused, or other connections kept its socket busy until the deadline.
        OSError: The server can't be reached, or this process may open no more files.
    """
    name, _, key = address.partition("/")
    began_s, is_reported = time.monotonic(), False
    while (fd := _try_to_take(name, key, deadline)) is None:
        waited_s = time.monotonic() - began_s
        if deadline.is_over():
            raise RendezvousError(
                f"Rank {rank} could not be asked for its memory for {waited_s:.1f} s.",
                seen="its socket was full of other connections",
                likely=FLOODED,
                hint=FLOODED_HINT,
            )
        if not is_reported and waited_s > _WARN_AFTER_S:
            is_reported = True
            _log.warning(
                "paceline: the socket of rank %d has been full of other connections for %.0f s; this rank "
                "waits for a place. Likely %s. %s",
                rank,
                waited_s,
                FLOODED,
                FLOODED_HINT,
            )
        time.sleep(RETRY_S)
    return fd


def _try_to_take(name: str, key: str, deadline: Deadline) -> int | None:
    try:
        peer = connect_local(name, min(deadline.left_s(), _TRY_S))
    except BlockingIOError:
        return None
    with peer:
        check_same_user(peer)
        with contextlib.suppress(ConnectionError):  # an answer that the server sent before can still be read
            send_frame(peer, Frame.HELLO, key.encode(), deadline)
        kind, text, fd = _receive_answer(peer, deadline)
    if kind is Frame.FULL:
        return None
    if kind is not Frame.WELCOME or fd < 0:
        raise RendezvousError(
            "The descriptor of shared memory did not come.", seen=text.decode(errors="replace")
        )
    return fd


def _receive_answer(peer: socket.socket, deadline: Deadline) -> tuple[Frame, bytes, int]:
    """Receives a descriptor that is close-on-exec from the start, because another thread may be starting a
    program at this moment; socket.recv_fds cannot do that.
    """
    reader, fds = FrameReader(LONGEST_HELLO), array.array("i")
    try:
        while True:
            peer.settimeout(max(deadline.left_s(), 1e-3))
            piece, messages, flags, _ = peer.recvmsg(
                reader.wants, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in messages:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            if not fds and flags & socket.MSG_CTRUNC:  # the kernel's sign that no descriptor is free
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not piece:
                raise ConnectionError("the other end closed the connection")
            if (answer := reader.feed(piece)) is not None:
                return *answer, fds[0] if fds else -1
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
