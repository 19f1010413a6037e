"""Messages between hosts over a process group whose calls block, and are paired only by their order.

Each connection has one direction, and one thread at each end. The sending thread sends messages in the order
in which they were begun. The receiving thread reads the header of each arriving message, and copies it to the
memory of the receive that waits for it. So the two ends may begin messages in any order and from any thread,
and several models may share the connections. There may be several connections to each peer, because a process
group may ask for room before it sends a message, and this question waits in the same queue as data.

    this rank                                                            its peer
    send()    -> queue -> thread -> process group's call .. thread -> header -> memory of a receive()
    receive() <- header <- thread <- process group's call .. thread <- queue <- send()

A process group may give up a call after a fixed time (Paddle's Gloo: 30 s). So the receiving thread is always
in a call, and the sending thread sends a few bytes if there has been nothing else to send for a while.
Therefore only this rank's own deadline limits its waits.

Memory: a frame for each peer, and messages that have arrived before this rank began to receive them, up to
what peers may have in flight.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from paceline.health import exit_reports
from paceline.health.connections import shut_down, stop_receiving
from paceline.reducer.between_hosts.message_headers import (
    HEADER_BYTES,
    PLANS,
    Header,
    Message,
    lane_of,
    tag_of,
)
from paceline.reducer.between_hosts.routes import MESSAGE_BYTES
from paceline.rendezvous.resource_limits import start_thread

FRAME_BYTES = MESSAGE_BYTES + (64 << 10)
"""Most bytes of one call: a piece with its header and usual reports. Longer messages take several calls."""
IDLE_S = 8.0
"""After this time without a message, some bytes show that this rank is alive: a third of Paddle's limit."""
_ENDED_WITHIN_S = 1.0  # the wait for a thread at the end of the process
_IDLE, _OVER = b"idle", b"over"

Carry = Callable[[Message], None]
"""Moves one frame, and blocks until it has been sent, or has arrived. Raises RuntimeError if the connection
has ended. The memory of a received frame may be longer than the frame."""
_Key = tuple[int, int]  # model, tag
_Item = TypeVar("_Item")


class PipedTransfer:
    """A message on its way."""

    __slots__ = ("__weakref__", "_error", "_under_way", "message")

    def __init__(self, message: Message) -> None:
        self.message = message
        self._error = ""
        # A Lock, because an Event creates a lock for each wait, and takes Python's global lock more often.
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def end(self, error: str = "") -> None:
        """End the transfer, with an error if it failed."""
        self._error = error
        self._under_way.release()

    def wait(self, timeout_s: float) -> None:
        if not self._under_way.acquire(timeout=timeout_s):
            raise RuntimeError(f"Timed out: nothing has come for {timeout_s:.1f} s")
        self._under_way.release()
        if self._error:
            raise RuntimeError(self._error)


class Pipes:
    """One rank's connections to its peers, for all models that are wrapped over one group."""

    def __init__(
        self,
        host: int,
        ranks: Sequence[int],
        names: Sequence[str],
        outgoing: Mapping[int, Sequence[Carry]],
        incoming: Mapping[int, Sequence[Carry]],
        sockets: Sequence[socket.socket],
        limit_s: float,
    ) -> None:
        self.host, self.ranks, self.names = host, ranks, names
        self.num_models = 0
        self._pid = os.getpid()
        self._sockets = sockets
        self._lock = threading.Lock()
        self._num_in_calls = sum(len(each) for each in (*outgoing.values(), *incoming.values()))
        over = self._note_end
        self.outgoing = {
            other: [_Outgoing(carry, limit_s, over) for carry in each] for other, each in outgoing.items()
        }
        self.incoming = {
            other: [_Incoming(carry, limit_s, over) for carry in each] for other, each in incoming.items()
        }
        self._senders = [lane for each in self.outgoing.values() for lane in each]
        self._receivers = [lane for each in self.incoming.values() for lane in each]
        exit_reports.at_failure(self._end_for)
        exit_reports.before_leaving(self.close, is_last=True)  # after messages that are still on their way

    def abort(self) -> None:
        """End all waits with an error; nothing can be sent any more. Not collective, does not block."""
        if os.getpid() == self._pid:  # a forked child has the same connections, and must not end them
            stop_receiving(self._sockets)
            for sender in self._senders:
                sender.leave()  # wakes a thread with nothing to send, which would notice only later

    def close(self) -> None:
        """Notify peers that this rank leaves, and end the threads. Not collective; takes seconds at most."""
        if os.getpid() != self._pid:
            return
        for sender in self._senders:
            sender.leave()
        self._join(self._senders)
        self._join(self._receivers)  # until the peers have left, too, because they may be about to say so
        self.abort()
        self._join([*self._senders, *self._receivers])

    def _end_for(self, error: BaseException) -> None:
        """End the threads when an exception ends this process, before the interpreter is gone."""
        if os.getpid() == self._pid:
            self.abort()
            self._join([*self._senders, *self._receivers])

    def _note_end(self) -> None:
        with self._lock:
            self._num_in_calls -= 1
            is_last = self._num_in_calls == 0
        if is_last:
            shut_down(self._sockets)

    def _join(self, lanes: Iterable[_Lane]) -> None:
        until_s = time.monotonic() + _ENDED_WITHIN_S
        for lane in lanes:
            lane.thread.join(max(0.0, until_s - time.monotonic()))


class PipedTransport:
    def __init__(self, pipes: Pipes, model: int) -> None:
        self.host, self.ranks = pipes.host, pipes.ranks
        self.needs_headers = self.lets_signals_in = True
        self._pipes, self._model = pipes, model

    def sending(self, host: int, message: Message, tag: int) -> Callable[[], PipedTransfer]:
        lanes = self._pipes.outgoing[host]
        return partial(lanes[lane_of(tag, len(lanes))].send, message)

    def receiving(self, host: int, message: Message, tag: int) -> Callable[[], PipedTransfer]:
        lanes = self._pipes.incoming[host]
        return partial(lanes[lane_of(tag, len(lanes))].receive, message, (self._model, tag))

    def timeout_of(self, timeout_s: float) -> float:
        return timeout_s

    def name(self, host: int) -> str:
        return self._pipes.names[host]

    def abort(self) -> None:
        self._pipes.abort()


class _Lane(ABC):
    def __init__(self, carry: Carry, limit_s: float, over: Callable[[], None], name: str) -> None:
        self._carry_frame, self._limit_s, self._over = carry, limit_s, over
        self._lock = threading.Lock()
        self._error = ""
        self.thread = threading.Thread(target=self._run_to_end, name=name, daemon=True)
        start_thread(self.thread)

    def _run_to_end(self) -> None:
        try:
            self._run()
        finally:
            self._over()

    @abstractmethod
    def _run(self) -> None: ...

    def _carry(self, frame: Message) -> None:
        """Raises RuntimeError if the connection has ended, in words that `process_group_waits` knows."""
        began_s = time.monotonic()
        try:
            self._carry_frame(frame)
        except RuntimeError as error:
            # The original message stays in the cause. Paddle calls every end of a connection a time-out.
            if time.monotonic() - began_s < 0.8 * self._limit_s:
                raise RuntimeError("Connection closed by peer") from error
            text = f"Timed out: no sign of life for {self._limit_s:g} s, after which the engine gives up"
            raise RuntimeError(text) from error


class _Outgoing(_Lane):
    def __init__(self, carry: Carry, limit_s: float, over: Callable[[], None]) -> None:
        self._queue: queue.SimpleQueue[PipedTransfer | None] = queue.SimpleQueue()
        super().__init__(carry, limit_s, over, "paceline-send")

    def send(self, message: Message) -> PipedTransfer:
        transfer = PipedTransfer(message)
        with self._lock:
            if self._error:
                raise RuntimeError(self._error)
            self._queue.put(transfer)
        return transfer

    def leave(self) -> None:
        """Send the peer a last notice that nothing more will come. Does not block."""
        self._queue.put(None)

    def _run(self) -> None:
        transfer: PipedTransfer | None = None
        try:
            while True:
                try:
                    transfer = self._queue.get(timeout=IDLE_S)
                except queue.Empty:
                    self._carry(_notice(_IDLE))
                    continue
                if transfer is None:
                    self._carry(_notice(_OVER))
                    raise RuntimeError("Connection closed: this rank has left")
                for begin in range(0, len(transfer.message), FRAME_BYTES):
                    self._carry(transfer.message[begin : begin + FRAME_BYTES])
                transfer.end()
                transfer = None  # an error that ends the connection later does not concern it
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__, transfer)

    def _give_up(self, text: str, transfer: PipedTransfer | None) -> None:
        with self._lock:
            self._error = text
        while True:
            if transfer is not None:
                transfer.end(text)
            try:
                transfer = self._queue.get_nowait()
            except queue.Empty:
                return


class _Incoming(_Lane):
    def __init__(self, carry: Carry, limit_s: float, over: Callable[[], None]) -> None:
        self._frame: Message = np.empty(FRAME_BYTES, np.uint8)
        # Weak references, so that receives of a replaced plan are freed with the plan and their memory.
        self._awaited: dict[_Key, deque[weakref.ref[PipedTransfer]]] = {}
        self._early: dict[_Key, deque[Message]] = {}
        super().__init__(carry, limit_s, over, "paceline-receive")

    def receive(self, message: Message, key: _Key) -> PipedTransfer:
        transfer = PipedTransfer(message)
        with self._lock:
            early = self._early.get(key)
            if early is None:
                if self._error:
                    raise RuntimeError(self._error)
                self._awaited.setdefault(key, deque()).append(weakref.ref(transfer))
                return transfer
            found = _pop(self._early, key)
        _lay(found, transfer)
        return transfer

    def _run(self) -> None:
        try:
            while (message := self._next()) is not None:
                self._hand_on(message)
            raise RuntimeError("Connection closed by peer: it has left")
        except BaseException as error:
            with self._lock:
                self._error = str(error) or type(error).__name__
                waiting = [transfer() for row in self._awaited.values() for transfer in row]
                self._awaited.clear()
            for transfer in waiting:
                if transfer is not None:
                    transfer.end(self._error)

    def _next(self) -> Message | None:
        """The next message, in memory that is reused for the one after it; None: the peer has left."""
        while True:
            self._carry(self._frame)
            kind = bytes(self._frame[: len(_IDLE)])
            if kind == _OVER:
                return None
            if kind != _IDLE:
                break
        header = Header.read(self._frame)
        if header is None:
            raise RuntimeError("what came is no message of ours")
        nbytes = HEADER_BYTES + header.nbytes
        if nbytes <= FRAME_BYTES:
            return self._frame[:nbytes]
        whole = np.empty(nbytes, np.uint8)
        whole[:FRAME_BYTES] = self._frame
        for begin in range(FRAME_BYTES, nbytes, FRAME_BYTES):
            self._carry(whole[begin : begin + FRAME_BYTES])
        return whole

    def _hand_on(self, message: Message) -> None:
        header = Header.read(message)
        assert header is not None
        tag = tag_of(header.bucket, header.round, header.piece, header.generation)
        key = header.generation // PLANS, tag
        with self._lock:
            transfer = None
            while transfer is None and key in self._awaited:
                transfer = _pop(self._awaited, key)()
            if transfer is None:
                self._early.setdefault(key, deque()).append(message.copy())
                return
        _lay(message, transfer)


def _pop(rows: dict[_Key, deque[_Item]], key: _Key) -> _Item:
    row = rows[key]
    found = row.popleft()
    if not row:
        del rows[key]
    return found


def _lay(message: Message, transfer: PipedTransfer) -> None:
    """Copy a message to its receive. Refuses another size, as a transport without this copy would."""
    if len(message) != len(transfer.message):
        transfer.end(f"a message of {len(message)} bytes came where {len(transfer.message)} are awaited")
        return
    transfer.message[:] = message
    transfer.end()


def _notice(kind: bytes) -> Message:
    frame = np.zeros(HEADER_BYTES, np.uint8)
    frame[: len(kind)] = np.frombuffer(kind, np.uint8)
    return frame
