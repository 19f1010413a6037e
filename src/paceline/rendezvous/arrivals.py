"""Measures for how long nothing has come from another host, over any TCP connection with it.

A slow link with a deep queue delays the messages of the control channel by many seconds, while gradients go
on arriving. So every segment from the address of a neighbour is a sign of life, over whichever connection of
this host it comes. The kernel counts segments, whatever the threads of this process do meanwhile: `TCP_INFO`
of tcp(7) for the connection itself, and sock_diag(7), which is asked only in a silence, for all others.

After losses on such a link, or after a short cut, TCP may wait for longer than the silence that is allowed
before it sends anything again. So in a silence a new connection is tried as well. Any answer is a sign of
life; as a rule it is that no program listens there.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SUSPICIOUS_S = 1.0  # after which the other connections are looked at, and a new one is tried
_LATE_S = 0.5  # how much later than it is due a look may come
_TRIED_FOR_S = 0.9  # less than it takes the kernel to try again by itself
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
_INFO_BYTES = 144  # of struct tcp_info in linux/tcp.h, up to the number of segments
_LAST_RECEIVED = struct.Struct("=2I")  # milliseconds since the last data and the last acknowledgement
_LAST_RECEIVED_AT = 52
_SEGMENTS = struct.Struct("=I")
_SEGMENTS_AT = 140
_REQUEST = struct.Struct("=IHHIIBBBxI48x")  # a netlink header, and struct inet_diag_req_v2
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_PORTS = struct.Struct(">HH")
_PEER_AT, _ATTRIBUTES_AT = 24, 72  # in struct inet_diag_msg
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE, _INFO, _ESTABLISHED = 2, 3, 2, 1
_ANSWER_BYTES = 1 << 18
_ANSWERS_WITHIN_S = 1.0


@dataclass
class _Neighbour:
    connection: socket.socket
    address: tuple[Any, ...]
    segments: int
    since_s: float  # when something came last
    elsewhere: dict[tuple[int, int], int] | None = None  # segments over all connections, by their ports
    trial: _Trial | None = None

    def note(self, now: float) -> None:
        """Something has come."""
        self.since_s, self.elsewhere = now, None
        self.try_again(None)

    def try_again(self, trial: _Trial | None) -> None:
        """Let a new connection be tried instead of the last one; None: none is."""
        before, self.trial = self.trial, trial
        if before is not None:
            before.close()


class _Trial:
    """A connection that is tried, to see whether its other end answers.

    Args:
        family: AF_INET or AF_INET6.
        address: Where to.
        now: By time.monotonic().
    """

    def __init__(self, family: int, address: tuple[Any, ...], now: float) -> None:
        self.began_s = now
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.connect_ex(address)

    def close(self) -> None:
        """Give it up."""
        self._socket.close()

    def is_answered(self) -> bool:
        """Whether something has come back. Does not block."""
        watched = select.poll()
        watched.register(self._socket, select.POLLOUT)
        return (
            bool(watched.poll(0)) and self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS
        )


class Arrivals:
    """What comes from the other ends of some connections, and from their hosts.

    Args:
        connections: By the rank at the other end.
        now: By time.monotonic().
    """

    def __init__(self, connections: Mapping[int, socket.socket], now: float) -> None:
        self._neighbours = {
            rank: _Neighbour(each, each.getpeername(), _segments_of(each), now)
            for rank, each in connections.items()
        }

    def forget(self, rank: int) -> None:
        """The connection has ended."""
        gone = self._neighbours.pop(rank, None)
        if gone is not None:
            gone.try_again(None)

    def longest_silence_s(self, now: float) -> float:
        """For how long nothing has come from the neighbour that is silent for longest, at the last look."""
        return now - min((each.since_s for each in self._neighbours.values()), default=now)

    def silent(self, silence_s: float, now: float) -> list[int]:
        """Look at all connections; the ranks of which, and of whose hosts, nothing has come for so long."""
        seen: dict[str, dict[tuple[int, int], int] | None] = {}
        suspicious_s = min(_SUSPICIOUS_S, silence_s / 2)
        for each in self._neighbours.values():
            segments = _segments_of(each.connection)
            if segments != each.segments:
                each.segments = segments
                each.note(now)
            elif now - each.since_s >= suspicious_s:
                host = each.address[0]
                if host not in seen:
                    seen[host] = _segments_from(host)
                self._suspect(each, seen[host], now, suspicious_s)
        return [rank for rank, each in self._neighbours.items() if now - each.since_s >= silence_s]

    @staticmethod
    def _suspect(
        each: _Neighbour, elsewhere: dict[tuple[int, int], int] | None, now: float, suspicious_s: float
    ) -> None:
        if each.trial is None:
            # Where this process could not look for long: what came elsewhere meanwhile is not known.
            each.since_s = max(each.since_s, now - suspicious_s - _LATE_S)
        elif each.trial.is_answered() or _has_grown(each.elsewhere or {}, elsewhere or {}):
            each.note(now)
            return
        each.elsewhere = elsewhere
        if each.trial is None or now - each.trial.began_s >= _TRIED_FOR_S:
            each.try_again(_Trial(each.connection.family, each.address, now))


def _has_grown(before: Mapping[tuple[int, int], int], now: Mapping[tuple[int, int], int]) -> bool:
    """Whether segments have come; a connection that this host has closed is none."""
    return any(count != before.get(ports) for ports, count in now.items())


def quiet_s(connection: socket.socket) -> float:
    """Seconds since data or an acknowledgement has come over a connection, which may have ended."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return float(min(_LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT))) / 1000
    except (OSError, struct.error):
        return 0.0


def _segments_of(connection: socket.socket) -> int:
    """How many segments have come; 0: the kernel does not say (Linux before 4.2), or it has ended."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return int(_SEGMENTS.unpack_from(info, _SEGMENTS_AT)[0])
    except (OSError, struct.error):
        return 0


def _segments_from(address: str) -> dict[tuple[int, int], int] | None:
    """How many segments have come from an address, by the ports; None: the kernel does not say."""
    plain = address.removeprefix("::ffff:").partition("%")[0]
    try:
        if ":" in plain:
            return _dump(socket.AF_INET6, plain)
        # A program may use an address of version 4 as it is, or as one of version 6.
        return _dump(socket.AF_INET, plain) | _dump(socket.AF_INET6, f"::ffff:{plain}")
    except (OSError, struct.error):
        return None


def _dump(family: int, address: str) -> dict[tuple[int, int], int]:
    wanted = socket.inet_pton(family, address)
    request = _REQUEST.pack(
        _REQUEST.size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0,
        family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 1 << _ESTABLISHED,
    )  # fmt: skip
    found: dict[tuple[int, int], int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(_ANSWERS_WITHIN_S)
        asked.send(request)
        while True:
            answer = asked.recv(_ANSWER_BYTES)
            at = 0
            while at + _HEADER.size <= len(answer):
                length, kind, *_ = _HEADER.unpack_from(answer, at)
                if kind == _DONE:
                    return found
                if kind == _ERROR or length < _HEADER.size:
                    raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
                body = answer[at + _HEADER.size : at + length]
                if body[_PEER_AT:].startswith(wanted):
                    found[_PORTS.unpack_from(body, 4)] = _segments_in(body)
                at += length + -length % 4


def _segments_in(body: bytes) -> int:
    """The number of segments in a struct inet_diag_msg with its attributes."""
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INFO:
            return int(_SEGMENTS.unpack_from(body, at + _ATTRIBUTE.size + _SEGMENTS_AT)[0])
        at += max(length + -length % 4, _ATTRIBUTE.size)
    return 0
