"""Descriptors of files without a name, from one rank to the others of its host, over abstract Unix sockets.

Imports errors and the standard library.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import threading
import time

from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.frames import Frame, check_same_user, listen, receive_frame, send_frame
from paceline.rendezvous.limits import OUT_OF_ROOM
from paceline.rendezvous.obstacles import Obstacle

_RETRY_S = 0.01


class DescriptorServer:
    """Where a rank hands out a descriptor: a socket, and a thread that serves it until the server closes.

    Args:
        world_size: How many may ask at once.

    Attributes:
        address: The socket's, for `take_descriptor`; "": there is none.
        obstacle: Why there is none.
    """

    def __init__(self, world_size: int) -> None:
        self.address = ""
        self.obstacle = Obstacle()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        try:
            self._listener = listen("", world_size)
            self.address = self._listener.getsockname()[1:].decode("ascii")
        except OSError as error:
            self.obstacle = Obstacle.of_system(error, "open a socket")
            if not self.obstacle.is_limit:
                raise

    def serve(self, fd: int) -> None:
        """Hand out `fd`, which stays the caller's and must stay open, to whoever of this user asks."""
        self._thread = threading.Thread(
            target=self._hand_out, args=(fd,), name="paceline-server", daemon=True
        )
        self._thread.start()

    def _hand_out(self, fd: int) -> None:
        assert self._listener is not None
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if error.errno in OUT_OF_ROOM:
                    time.sleep(_RETRY_S)  # until somebody closes a file; else that rank gives up waiting
                    continue
                return  # the server was closed
            with peer:
                try:
                    check_same_user(peer)
                    socket.send_fds(peer, [b"r"], [fd])
                    receive_frame(peer, Deadline(5.0))  # keeps the descriptor in flight until it was taken
                except Exception:
                    continue  # that rank reports by itself that it got nothing

    def __enter__(self) -> DescriptorServer:
        return self

    def close(self) -> None:
        if self._listener is None:
            return
        # shutdown() wakes a thread that sleeps in accept(); close() alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._thread is not None:
            self._thread.join(timeout=6.0)


def take_descriptor(address: str, deadline: Deadline) -> int:
    """The descriptor that the server at this address hands out; -1: it sent none.

    Raises:
        OSError: It can't be reached, or this process may open no more files.
    """
    fd = -1
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as hub:
            hub.settimeout(max(min(deadline.left_s(), 10.0), 1e-3))
            hub.connect("\0" + address)
            check_same_user(hub)
            fd = _receive_fd(hub)
            send_frame(hub, Frame.WELCOME, b"", deadline)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def _receive_fd(hub: socket.socket) -> int:
    """A descriptor, close-on-exec from the start: another thread may be starting a program just now.

    socket.recv_fds does not pass its flags on.
    """
    fds = array.array("i")
    _, messages, flags, _ = hub.recvmsg(1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not fds and flags & socket.MSG_CTRUNC:  # how the kernel says that there is no number left for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return fds[0] if fds else -1
