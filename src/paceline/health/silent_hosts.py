"""Measures for how long nothing has come from another host, over any TCP connection with it.

A slow network with a deep queue delays the messages of the control channel by many seconds, while gradients
still arrive. So every segment from the address of a neighbour is a sign of life, over whichever connection
of this host it comes.

After losses on such a network, or after a short cut, TCP may wait for longer than the allowed silence before
it retransmits. So during a silence a new connection is attempted as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import select
import socket
import struct
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SUSPICIOUS_S = 1.0  # of silence, after which other connections are checked and a new one is attempted
_LATE_S = 0.5  # how much later than scheduled a check may run
_TRIED_FOR_S = 0.9  # less than the kernel takes to retry by itself
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
_INFO_BYTES = 144  # of struct tcp_info in linux/tcp.h, up to the number of segments
_LAST_RECEIVED = struct.Struct("=2I")  # milliseconds since the last data and the last acknowledgement
_LAST_RECEIVED_AT = 52
_SEGMENTS = struct.Struct("=I")
_BYTES = struct.Struct("=i")
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


@dataclass
class _Host:
    neighbours: dict[int, _Neighbour]
    since_s: float
    looked_at_s: float
    elsewhere: dict[tuple[int, int], int] = field(default_factory=dict)
    trial: _Trial | None = None

    def note(self, at_s: float) -> None:
        self.since_s, self.elsewhere = at_s, {}
        self.try_again(None)

    def try_again(self, trial: _Trial | None) -> None:
        before, self.trial = self.trial, trial
        if before is not None:
            before.close()


class _Trial:
    """A connection attempt, to see whether the other end answers."""

    def __init__(self, family: int, address: tuple[Any, ...], now: float) -> None:
        self.began_s = now
        self._socket: socket.socket | None = None  # None: this host cannot even try
        with contextlib.suppress(OSError):  # no file descriptor is free
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            # If this host has no route to the other any more, the call itself fails, and the socket shows
            # nothing of it afterwards.
            if self._socket.connect_ex(address) not in (errno.EINPROGRESS, *_ANSWERS):
                self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def is_answered(self) -> bool:
        if self._socket is None:
            return False
        watched = select.poll()
        watched.register(self._socket, select.POLLOUT)
        return (
            bool(watched.poll(0)) and self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS
        )


class Arrivals:
    """Tracks what arrives from the other ends of some connections, and from their hosts."""

    def __init__(
        self, connections: Mapping[int, socket.socket], hosts: Sequence[Sequence[int]], now: float
    ) -> None:
        neighbours = {
            rank: _Neighbour(each, each.getpeername(), _segments_of(each))
            for rank, each in connections.items()
        }
        grouped = [{rank: neighbours[rank] for rank in ranks if rank in neighbours} for ranks in hosts]
        self._hosts = [_Host(each, now, now) for each in grouped if each]

    def forget(self, rank: int) -> None:
        for host in self._hosts:
            if host.neighbours.pop(rank, None) is not None and not host.neighbours:
                host.try_again(None)
        self._hosts = [host for host in self._hosts if host.neighbours]

    def silent(self, silence_s: float, now: float) -> list[int]:
        """Check all connections; returns the ranks of the hosts that have been silent for `silence_s`."""
        suspicious_s = min(_SUSPICIOUS_S, silence_s / 2)
        for host in self._hosts:
            if (came_s := _last_arrival_s(host, now)) is not None:
                host.note(came_s)
            elif now - host.since_s >= suspicious_s:
                _suspect(host, now, suspicious_s)
            host.looked_at_s = now
        return [rank for host in self._hosts if now - host.since_s >= silence_s for rank in host.neighbours]

    def judged_at_s(self, silence_s: float) -> float:
        return min((host.since_s + silence_s for host in self._hosts), default=math.inf)


def _last_arrival_s(host: _Host, now: float) -> float | None:
    found: float | None = None
    for each in host.neighbours.values():
        segments = _segments_of(each.connection)
        if segments != each.segments:
            each.segments = segments
            # The kernel dates data and acknowledgements, but not what it drops, such as retransmitted data.
            came_s = now - quiet_s(each.connection)
            found = max(came_s if came_s > host.looked_at_s else now, found or 0.0)
    return found


def _suspect(host: _Host, now: float, suspicious_s: float) -> None:
    elsewhere: dict[tuple[int, int], int] = {}
    for address in {each.address[0] for each in host.neighbours.values()}:
        elsewhere |= _segments_from(address)
    if host.trial is None:
        # If this process could not check for long, it does not know what came over other connections.
        host.since_s = max(host.since_s, now - suspicious_s - _LATE_S)
    elif host.trial.is_answered() or _has_grown(host.elsewhere, elsewhere):
        host.note(now)
        return
    host.elsewhere = elsewhere
    if host.trial is None or now - host.trial.began_s >= _TRIED_FOR_S:
        each = next(iter(host.neighbours.values()))
        host.try_again(_Trial(each.connection.family, each.address, now))


def _has_grown(before: Mapping[tuple[int, int], int], now: Mapping[tuple[int, int], int]) -> bool:
    return any(count != before.get(ports) for ports, count in now.items())


def quiet_s(connection: socket.socket) -> float:
    """Seconds since data or an acknowledgement came over a connection, which may have ended."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return float(min(_LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT))) / 1000
    except (OSError, struct.error):
        return 0.0


def unconfirmed_bytes(connection: socket.socket) -> int:
    (count,) = _BYTES.unpack(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(_BYTES.size)))
    return int(count)


def _segments_of(connection: socket.socket) -> int:
    """How many segments have come; 0 if the kernel does not say (Linux before 4.2), or if it has ended."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return int(_SEGMENTS.unpack_from(info, _SEGMENTS_AT)[0])
    except (OSError, struct.error):
        return 0


def _segments_from(address: str) -> dict[tuple[int, int], int]:
    """How many segments have come from an address, by ports; empty if the kernel does not say."""
    plain = address.removeprefix("::ffff:").partition("%")[0]
    try:
        if ":" in plain:
            return _dump(socket.AF_INET6, plain)
        # A program may use an IPv4 address as it is, or mapped into IPv6.
        return _dump(socket.AF_INET, plain) | _dump(socket.AF_INET6, f"::ffff:{plain}")
    except (OSError, struct.error):
        return {}


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
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if kind == _INFO:
            return int(_SEGMENTS.unpack_from(body, at + _ATTRIBUTE.size + _SEGMENTS_AT)[0])
        at += max(length + -length % 4, _ATTRIBUTE.size)
    return 0
