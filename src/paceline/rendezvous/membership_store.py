"""A TCP store of text values and counters for all ranks of a job, before a framework has a store of its own.

The process of rank 0 serves it to every process that connects: a request is one line of JSON, and so is the
answer. Its content is neither secret nor trusted: ranks sign what they write (`signatures`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

from paceline.rendezvous.deadline import Deadline
from paceline.rendezvous.resource_limits import start_thread

_LONGEST_LINE = 1 << 16
_MOST_BYTES = 1 << 26
"""Of keys and values, so that an unknown peer cannot fill the memory; a rank takes some 10 kB."""
_MOST_UNKNOWN_PEERS = 64
"""Connections beyond one for each rank, so that an unknown peer cannot take all file descriptors."""
_BACKLOG = 1024
_LARGEST_AMOUNT = 1 << 31
_RETRY_S = 0.05


class MembershipServer:
    """Serves a membership store in a thread of its own, until `close` or the end of the process."""

    def __init__(self, port: int, world_size: int) -> None:
        self._listener = socket.create_server(("", port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._most_connections = world_size + _MOST_UNKNOWN_PEERS
        self._unread: dict[socket.socket, bytes] = {}
        # Connections without a request so far, the oldest first.
        self._silent: dict[socket.socket, None] = {}
        self._words: dict[str, str] = {}
        self._counters: Counter[str] = Counter()
        self._bytes = 0  # of both
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._pid = os.getpid()
        # A child that outlives this process would hold the port without answering.
        os.register_at_fork(after_in_child=self._listener.close)
        self._thread = threading.Thread(target=self._serve, name="paceline-membership-store", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Stop serving. Does nothing in a forked child."""
        if os.getpid() == self._pid and self._thread.is_alive():
            self._wake.send(b"\0")
            self._thread.join()

    def _serve(self) -> None:
        with self._selector, self._wake, self._woken:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._woken:
                        for each in (self._listener, *self._unread):
                            each.close()
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._receive(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone; or there are no descriptors left, and then it is still queued
            time.sleep(_RETRY_S)
            return
        if len(self._unread) >= self._most_connections:
            if not self._silent:
                connection.close()
                return
            self._drop(next(iter(self._silent)))
        connection.settimeout(0.0)
        with contextlib.suppress(OSError):  # it has gone; the next read will show that
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread[connection] = b""
        self._silent[connection] = None
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unread[connection]
        self._silent.pop(connection, None)
        connection.close()

    def _receive(self, connection: socket.socket) -> None:
        try:
            found = connection.recv(_LONGEST_LINE)
            if not found:
                raise ConnectionError
            *lines, rest = (self._unread[connection] + found).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                raise ValueError
            self._unread[connection] = rest
            for line in lines:
                # The answer is small and its reader waits, so it fits into the socket's buffer; a peer for
                # which it does not is no rank.
                connection.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\n")
                self._silent.pop(connection, None)
        except (OSError, ValueError, TypeError, RecursionError):
            self._drop(connection)

    def _answer(self, request: Any) -> Any:
        """Raises ValueError or TypeError if it is not a request."""
        match request:
            case ["add", str(key), int(amount)] if abs(amount) <= _LARGEST_AMOUNT:
                if key not in self._counters:
                    self._take(key)
                self._counters[key] += amount
                return self._counters[key]
            case ["write", str(key), str(value)]:
                self._take(value, *(() if key in self._words else (key,)), instead=self._words.get(key, ""))
                self._words[key] = value
                return None
            case ["read", str(key)]:
                return self._words.get(key)
        raise ValueError("no request")

    def _take(self, *texts: str, instead: str = "") -> None:
        taken = self._bytes + sum(map(sys.getsizeof, texts)) - (sys.getsizeof(instead) if instead else 0)
        if taken > _MOST_BYTES:
            raise ValueError("no room")
        self._bytes = taken


class MembershipClient:
    """One rank's connection to the server; implements `paceline.rendezvous.membership.MembershipStore`.

    Example:
        Rank 1 calls write("a", "b"); then read("a") is "b" on rank 0. Both call add("n", 1): one of them
        gets 1 and the other one 2.
    """

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self._socket = socket.create_connection((address, port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def close(self) -> None:
        self._socket.close()

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def write(self, key: str, value: str) -> None:
        self._ask("write", key, value)

    def read(self, key: str) -> str | None:
        found = self._ask("read", key)
        return None if found is None else str(found)

    def _ask(self, *request: str | int) -> Any:
        """Raises RuntimeError if the server is gone or does not answer; the connection is closed then."""
        deadline, answer = Deadline(self._timeout_s), b""
        try:
            with self._lock:
                self._socket.settimeout(self._timeout_s)
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                while not answer.endswith(b"\n"):
                    self._socket.settimeout(max(deadline.left_s(), 1e-3))
                    found = self._socket.recv(_LONGEST_LINE)
                    if not found or len(answer) > 2 * _LONGEST_LINE:
                        raise ConnectionError("the process that serves it has closed the connection")
                    answer += found
            return json.loads(answer)
        except OSError as error:
            self.close()  # a late answer would be taken for that of the next request
            raise RuntimeError(error.strerror or str(error) or "no answer in time") from error
        except ValueError as error:
            self.close()
            raise RuntimeError(f"no membership store of Paceline's answers: {error}") from error
