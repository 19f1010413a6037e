"""The TCP connections that a process group has made between ranks, duplicated so that they can be ended.

A call that blocks in the process group cannot be ended otherwise. A plain close() would not do: data that
arrives at a closed connection resets it, and what the other side has not received yet is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import stat
import struct
import termios
import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from paceline.health import exit_reports
from paceline.rendezvous.exchange import Exchange

_ARRIVES_WITHIN_S = 10.0  # for what is in this machine's buffers, over a slow network
_LOOK_S = 0.001
Ends = tuple[Any, Any]
"""The addresses of both ends of a connection."""


def open_sockets() -> frozenset[int]:
    """The inodes of this process's sockets. Cheaper than their addresses: one system call for each file."""
    return frozenset(inode for _, inode in _sockets())


def connected_sockets(but: Container[int] = ()) -> dict[Ends, int]:
    """This process's TCP connections except those with the inodes in `but`, with their file descriptors."""
    found: dict[Ends, int] = {}
    for descriptor, inode in _sockets():
        if inode in but:
            continue
        # An error: it was closed meanwhile, or it is a listening socket.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
            if each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6):
                found[_address(each.getsockname()), _address(each.getpeername())] = descriptor
    return found


def _sockets() -> Iterator[tuple[int, int]]:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            state = os.fstat(descriptor)
            if stat.S_ISSOCK(state.st_mode):
                yield descriptor, state.st_ino


def _address(reported: Any) -> tuple[str, int]:
    return reported[0].removeprefix("::ffff:"), reported[1]


def send_at_once(connections: Mapping[Ends, int]) -> None:
    """Set TCP_NODELAY on connections."""
    for descriptor in connections.values():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def sockets_to(
    exchange: Exchange, peers: Sequence[int], before: Container[int], timeout_s: float
) -> list[socket.socket]:
    """The connections to peers whose inodes are not in `before`. Collective over all ranks of the exchange.

    Another thread may have made connections meanwhile, so one counts only if a peer has its other end.
    """
    made = connected_sockets(but=before)
    reported = exchange.all_gather(json.dumps(list(made)).encode(), timeout_s)
    theirs = {(tuple(a), tuple(b)) for peer in peers for a, b in json.loads(reported[peer])}
    found = [copy_of(fd, ends) for ends, fd in made.items() if ends[::-1] in theirs]
    return [each for each in found if each is not None]


def copy_of(descriptor: int, ends: Ends) -> socket.socket | None:
    """A socket of our own for the connection between these ends.

    None if the process group has closed it meanwhile: its descriptor may then refer to something else.
    """
    with contextlib.suppress(OSError):
        each = socket.socket(fileno=os.dup(descriptor))
        with contextlib.suppress(OSError):
            if (_address(each.getsockname()), _address(each.getpeername())) == ends:
                return each
        each.close()
    return None


def stop_receiving(sockets: Sequence[socket.socket]) -> None:
    """Make these connections look ended to this side, once it has read what came before. It may still write.

    In some process groups, such as Paddle's Gloo, a thread that writes to a connection that is shut down
    raises an exception that nothing catches, which ends the process. So only reading ends here, and the
    process group then closes its side.
    """
    _shut_down(sockets, socket.SHUT_RD)


def shut_down(sockets: Sequence[socket.socket]) -> None:
    """Shut down both directions. What was written before still arrives."""
    _shut_down(sockets, socket.SHUT_RDWR)


def close_once_arrived(sockets: Sequence[socket.socket]) -> None:
    """Close connections once the other machines have received all that was written to them. Does not block.

    The end of the process waits for this, for ten seconds at most.
    """
    if not any(map(_bytes_on_their_way, sockets)):
        _close(sockets)
        return
    _partings.begin(sockets)


def wait_until_arrived(sockets: Sequence[socket.socket]) -> None:
    until_s = time.monotonic() + _ARRIVES_WITHIN_S
    for each in sockets:
        while _bytes_on_their_way(each) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


class _Partings:
    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._pid = 0

    def begin(self, sockets: Sequence[socket.socket]) -> None:
        if self._pid != os.getpid():  # a forked child has none of these threads
            self._pid, self._threads = os.getpid(), []
            exit_reports.before_leaving(self.wait, is_last=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._part, args=(sockets,), name="paceline-parting", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        if self._pid == os.getpid():
            for thread in self._threads:
                thread.join(_ARRIVES_WITHIN_S)

    def _part(self, sockets: Sequence[socket.socket]) -> None:
        wait_until_arrived(sockets)
        _close(sockets)


_partings = _Partings()


def _bytes_on_their_way(connection: socket.socket) -> int:
    """Bytes written that the other machine has not acknowledged; 0 also if the connection has ended."""
    watched = select.poll()
    try:
        watched.register(connection, 0)
        if watched.poll(0):  # an error, or both sides have closed it
            return 0
        (found,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # it is closed
        return 0
    return int(found)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _shut_down(sockets: Sequence[socket.socket], how: int) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):  # it has ended already
            each.shutdown(how)
