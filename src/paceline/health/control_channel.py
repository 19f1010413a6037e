"""The control channel between the hosts of a job: detects dead and unreachable ranks, and reports why.

It is a star of TCP connections, one from each rank to the hub (rank 0), or a tree if there are many ranks
(`channel_tree`). Each process group makes one at start-up; gradients do not travel here. The kernels watch
the connections, not threads: when a process ends, for whatever reason, its kernel reports it at once. When a
network link is cut or a host stops, no segment arrives from that host any more, over any connection of this
host (`silent_hosts`): neither an answer to the hub's heartbeats nor one to the kernel's probes. After the
allowed silence, both ends drop the connection. A process that computes, is paused or holds the GIL for long
is not silent in this sense, because its kernel goes on answering; the deadline of the backward finds it.

    rank 3 dies, raises or leaves    its kernel, or the rank itself, notifies the hub
    a host is silent                 the end that drops the connection says so before it resets it: the other
                                     end may receive that, if the link is cut in one direction only
    the hub                          reports to all others, then ends its own waits
    every rank                       keeps the first failure; code that waits polls it or registers a callback

    figures of a rank's progress     go to the hub once a second, for its monitor; they are dropped if the
                                     connection has no room
    which ranks are late             is asked of all ranks at a deadline (`liveness_check`)

A rank may have sent its data for a backward before it died, so callbacks run a moment after a death. After an
exception they run at once. After a failure the channel goes on, but keeps the first failure.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import (
    CollectiveError,
    ConfigError,
    PacelineError,
    PeerLostError,
    RegionError,
    format_ranks,
)
from paceline.health import exit_reports
from paceline.health.channel_setup import Connection, connect_ranks
from paceline.health.channel_tree import HUB, neighbours_of
from paceline.health.handshake import Facts, Member
from paceline.health.liveness_check import (
    ASK_AGAIN_WITHIN_S,
    Activity,
    LivenessCheck,
    Progress,
)
from paceline.health.peer_errors import (
    FAILURE_BYTES,
    SILENCE_VARIABLE,
    How,
    LateRanks,
    Loss,
    late_ranks,
    pack_failure,
    unpack_failure,
)
from paceline.health.silent_hosts import Arrivals, quiet_s, unconfirmed_bytes
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.frames import Frame
from paceline.rendezvous.resource_limits import start_thread
from paceline.trace.remote_ranks import RemoteRanks

BEAT_S = 0.25
_SILENCE_S = 3.0
_ANSWER_S = 5.0  # between heartbeats of the other ranks, which only show the hub that their threads run
_STALLED_S = 15.0  # without a message: heartbeats stop, or they would fill the buffers; the kernel probes
_FORM_WITHIN_S = 60.0
_LEAVE_WITHIN_S = 2.0  # for ranks still in the handshake, until they can read a goodbye
_LOOK_S = 0.005
_GRACE_S = 0.1  # for what a dead rank had sent before
_RESET_GRACE_S = 0.2  # until the other connections of that host are reset as well, if the network does it
_CONFIRM_EVERY_S = 0.05
# If nothing came for this long before a connection ended, the network was interrupted: heartbeats and the
# kernel's probes are answered more often.
_QUIET_S = 1.6
_NEVER_MS = 86_400_000  # the kernel must not drop a connection: it knows of one connection only
_RECEIVE_BYTES = 1 << 16
_MOST_UNSENT_BYTES = 1 << 18
_UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})
_RESET = frozenset({errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})
_RANK_BYTES = 4
_MOST_FIGURES_BYTES = 4096

_channels: weakref.WeakSet[ControlChannel] = weakref.WeakSet()


def form_channel(
    exchange: Exchange, facts: Facts, hosts: Sequence[Sequence[int]], secret: bytes, timeout_s: float
) -> ControlChannel:
    """Connect the ranks of several hosts. Collective; blocks at most a minute, or `timeout_s` if it is less.

    Args:
        exchange: An exchange that already works between the ranks.
        facts: What this rank reports about itself.
        hosts: The ranks of each host.
        secret: The job's secret; empty if it has none.
        timeout_s: The time-out, in seconds.

    Raises:
        RendezvousError: A rank did not connect or does not match (other versions, another secret); raised on
            every rank.
        ConfigError: PACELINE_SILENCE_S is not a valid time.
        RegionError: This process cannot start another thread; the channel reports that to the other ranks.
    """
    silence_s = allowed_silence_s()
    connections, members = connect_ranks(exchange, facts, hosts, secret, min(timeout_s, _FORM_WITHIN_S))
    return ControlChannel(facts.rank, connections, members, hosts, silence_s)


def allowed_silence_s(environ: Mapping[str, str] | None = None) -> float:
    """Seconds without a sign of life after which a host counts as lost."""
    text = (os.environ if environ is None else environ).get(SILENCE_VARIABLE, "")
    try:
        seconds = float(text) if text else _SILENCE_S
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 86400.0:
        raise ConfigError(
            f"{SILENCE_VARIABLE}={text!r} is no time.",
            expected="seconds from 1 to 86400 without a sign of life after which a host counts as lost",
            hint=f"leave it out for {_SILENCE_S:g} s",
            variable=SILENCE_VARIABLE,
        )
    return seconds


@dataclass(frozen=True)
class _Reset:
    at_s: float
    sent: Mapping[int, int]


class ControlChannel:
    """One rank's end of the channel, made by `form_channel`. It closes when it is no longer referenced.

    Attributes:
        failure: The first failure of another rank that was reported or detected, or None.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, Connection],
        members: Sequence[Member],
        hosts: Sequence[Sequence[int]],
        silence_s: float,
    ) -> None:
        self.failure: CollectiveError | None = None
        self.members = tuple(members)
        self._rank, self._hosts, self._silence_s = rank, hosts, silence_s
        neighbours = neighbours_of(rank, hosts)
        self._parent, self._below = neighbours.parent, neighbours.below
        self._pid = os.getpid()
        self._connections = dict(connections)
        self._unsent = dict.fromkeys(connections, b"")
        self._num_said = dict.fromkeys(connections, 0)  # bytes so far, including unsent ones
        self._to_send: deque[tuple[int, Frame, bytes]] = deque()
        self._is_sending = False
        now = time.monotonic()
        self._received_at_s = dict.fromkeys(connections, now)
        self._reset: dict[int, _Reset] = {}  # ranks whose connections were reset
        self._judges_at_s = math.inf
        self._reset_while_sending: set[int] = set()  # send() saw the reset; recv() then reports a plain end
        self._left: dict[int, str] = {}  # ranks that have left, with their last activity
        self._has_reported = self._is_leaving = self._is_closed = False
        self._has_failed = threading.Event()
        self._watcher: RemoteRanks | None = None
        self._callbacks: list[weakref.WeakMethod[Callable[[BaseException], object]]] = []
        self._calls_at_s: float | None = None
        self._beats_at_s = self._looks_at_s = now
        # Reentrant: a signal handler that raises may report the failure while its thread holds the lock.
        self._lock = threading.RLock()
        all_ranks = [each for ranks in hosts for each in ranks]
        send = weakref.WeakMethod(self._send)  # must not keep the channel alive

        def send_answers(to: int, kind: Frame, text: bytes) -> None:
            if (method := send()) is not None:
                method(to, kind, text)

        progress = weakref.WeakMethod(self._progress_to)

        def progress_to(other: int) -> Progress | None:
            return None if (method := progress()) is None else method(other)

        self._liveness = LivenessCheck(rank, neighbours, all_ranks, send_answers, progress_to, self._lock)
        self._selector = selectors.DefaultSelector()
        for other, connection in self._connections.items():
            _prepare(connection.socket)
            self._selector.register(connection.socket, selectors.EVENT_READ, other)
        self._arrivals = Arrivals({rank: each.socket for rank, each in connections.items()}, hosts, now)
        exit_reports.at_failure(self.report_failure)
        exit_reports.before_leaving(self.close)
        _forget_in_children(self)
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self),), name="paceline-control", daemon=True
        )
        try:
            start_thread(self._thread)
        except RegionError as error:
            self.report_failure(error)  # the other ranks count this rank as connected already
            raise

    def report_failure(self, error: BaseException) -> None:
        """Report to all ranks that this one fails, unless a failure is known already. Does not block."""
        if os.getpid() != self._pid:  # a forked child, whose copy of the lock may never be released
            return
        with self._lock:
            if self._has_reported or self._is_closed or self.failure is not None:
                return
            self._has_reported = True
            self._lose_sight(_lost_by(error))
            text = pack_failure(error, self._rank).encode()
            self._send_all(Frame.FAILED, self._rank.to_bytes(_RANK_BYTES, "little") + text)

    def wait(self, within_s: float) -> CollectiveError | None:
        self._has_failed.wait(within_s)
        return self.failure

    def at_failure(self, call: Callable[[BaseException], object]) -> None:
        """Call this method with the failure of another rank, as long as its object lives. It must not block.

        A thread of the channel calls it: at once if the other rank raised, and a moment later if it died. If
        the failure was reported before, this call makes the callback before it returns.
        """
        with self._lock:
            self._callbacks = [each for each in self._callbacks if each() is not None]
            self._callbacks.append(weakref.WeakMethod(call))
            has_been = self.failure is not None and self._calls_at_s is None
        if has_been and self.failure is not None:
            call(self.failure)

    def report(self, figures: bytes) -> None:
        """Send the hub what this rank has done, in at most 4096 bytes. Does not block; dropped if it cannot
        be sent now.
        """
        if os.getpid() != self._pid or self._parent is None or len(figures) > _MOST_FIGURES_BYTES:
            return
        with self._lock:
            self._pass_on(self._rank.to_bytes(_RANK_BYTES, "little") + figures)

    def watch(self, watcher: RemoteRanks) -> None:
        """At the hub: call this watcher with what the ranks report and with the ranks that are gone. The
        watcher must not block.
        """
        with self._lock:
            self._watcher = watcher

    @property
    def left(self) -> tuple[Member, ...]:
        return tuple(self.members[rank] for rank in sorted(self._left))

    def last_activity_of(self, rank: int) -> str:
        """The last activity of a rank that has left."""
        return self._left.get(rank, "")

    @property
    def activity(self) -> Activity:
        """What this rank is doing, for other ranks that find it late. Setting it sends nothing."""
        return self._liveness.activity

    @activity.setter
    def activity(self, activity: Activity) -> None:
        self._liveness.activity = activity

    def late(self, *, is_silent: bool = False) -> LateRanks | None:
        """Ranks for which the others wait: those that do not answer, else those that do not wait themselves.

        For a rank whose deadline has passed. Not collective; blocks at most half a second. If the question
        does not reach a host, blocks until it does or until that host is known to be lost, at most 2 s.
        Returns None if nothing is known, or if a new `failure` was reported meanwhile, which says more.
        """
        if os.getpid() != self._pid or self._is_closed:
            return None
        before = self.failure
        until_s = time.monotonic() + ASK_AGAIN_WITHIN_S
        while True:
            seen = self._liveness.ask(lambda: frozenset(self._left))
            if self.failure is not before:
                return None
            if not seen.unreached or before is not None or time.monotonic() >= until_s:
                break
        if is_silent:
            seen = seen.without_answers()
        own = next(ranks for ranks in self._hosts if self._rank in ranks)
        return late_ranks(seen, self.members, own)

    def close(self) -> None:
        """Leave in good order: the other ranks are notified, and go on. Not collective.

        Blocks for two seconds at most, and only while another rank is still in the handshake: that rank could
        not read the goodbye, and would take the end of the connection for a death.
        """
        self._leave(is_served=threading.current_thread() is not self._thread)

    def _leave(self, *, is_served: bool) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_leaving or self._is_closed:
                return
            self._is_leaving = True
            doing = self.activity.text.encode()
            self._send_all(Frame.LEFT, self._rank.to_bytes(_RANK_BYTES, "little") + doing)
        until_s = time.monotonic() + _LEAVE_WITHIN_S
        while not self._are_open() and time.monotonic() < until_s:
            if is_served:
                time.sleep(_LOOK_S)
            else:
                self._receive_ready(_LOOK_S)
        with self._lock:
            self._is_closed = True
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread

    def __del__(self) -> None:
        if hasattr(self, "_thread"):  # the thread holds the channel only during a turn, so it is in none now
            self._leave(is_served=False)
            self._release()

    # --- the thread ---

    def _turn(self) -> bool:
        self._receive_ready(self._nap_s())
        now = time.monotonic()
        with self._lock:
            self._beat(now)
            self._look(now)
            self._liveness.end_round(now)
            calls = self._due_calls(now)
            self._is_closed |= not self._connections and not self._reset and self._calls_at_s is None
        failure = self.failure
        for call in calls:
            if (method := call()) is not None and failure is not None:
                method(failure)
        if self._is_closed:
            self._release()
        return not self._is_closed

    def _receive_ready(self, within_s: float) -> None:
        with contextlib.suppress(OSError):
            for key, _ in self._selector.select(within_s):
                self._receive(key.data)

    def _are_open(self) -> bool:
        with self._lock:
            return self._is_closed or all(each.is_open for each in self._connections.values())

    def _nap_s(self) -> float:
        calls_at_s = math.inf if self._calls_at_s is None else self._calls_at_s
        ends_at_s = self._liveness.ends_at_s
        until_s = min(self._beats_at_s, self._looks_at_s, self._judges_at_s, calls_at_s, ends_at_s)
        return max(0.0, until_s - time.monotonic())

    def _release(self) -> None:
        for rank, connection in self._connections.items():
            self._arrivals.forget(rank)
            connection.socket.close()
        self._selector.close()

    def _beat(self, now: float) -> None:
        if now < self._beats_at_s:
            return
        self._beats_at_s = now + (BEAT_S if self._rank == HUB else _ANSWER_S)
        for rank in list(self._connections):
            if self._unsent[rank]:
                self._flush(rank)
            elif now - self._received_at_s[rank] < _STALLED_S or rank == self._parent:
                self._send(rank, Frame.BEAT, b"")

    def _look(self, now: float) -> None:
        if now >= self._judges_at_s:
            self._judges_at_s = math.inf
            for rank in list(self._reset):
                if rank in self._reset:  # else it was judged together with another rank of its host
                    self._judge_reset(rank, now)
        if now < self._looks_at_s:
            return
        for rank in self._arrivals.silent(self._silence_s, now):
            self._lose(rank, How.SILENT)
        self._looks_at_s = min(now + BEAT_S, self._arrivals.judged_at_s(self._silence_s))

    def _due_calls(self, now: float) -> list[weakref.WeakMethod[Callable[[BaseException], object]]]:
        if self._calls_at_s is None or now < self._calls_at_s:
            return []
        self._calls_at_s = None
        calls, self._callbacks = self._callbacks, []
        return calls

    def _receive(self, rank: int) -> None:
        connection = self._connections.get(rank)
        if connection is None:
            return
        try:
            piece = connection.socket.recv(_RECEIVE_BYTES)
            if not piece:
                with self._lock:  # another thread may be in send(), and has not recorded the reset yet
                    if rank in self._reset_while_sending:
                        raise ConnectionResetError(errno.ECONNRESET, "reset while a beat was sent")
                raise ConnectionResetError
            with self._lock:  # other threads may send meanwhile
                plain, answer = connection.decrypt(piece)
                if answer:
                    self._put(rank, answer)
            for kind, text in connection.receive(plain):
                self._received_at_s[rank] = time.monotonic()
                self._understand(rank, kind, text)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(rank, error)
        except (ValueError, TypeError, LookupError) as error:
            self._lose(rank, How.UNREADABLE, f"it sent what cannot be read ({error})")

    def _understand(self, rank: int, kind: Frame, text: bytes) -> None:
        with self._lock:
            if kind is Frame.FIGURES:
                self._receive_figures(rank, text)
            if kind in (Frame.ASK, Frame.ANSWER, Frame.SEEN):
                self._liveness.receive(rank, kind, text, lambda: frozenset(self._left))
            if kind is Frame.GAVE_UP:
                self._lose(
                    rank, How.SILENT, "it gave up, because one of the two hosts hears nothing from the other"
                )
            if kind is Frame.DIED:
                loss = Loss.unpack(text)
                self._check_speaker(rank, loss.ranks)
                self._send_all(kind, text, but=rank)
                self._lose_sight(loss.ranks)  # even if this is not the first failure
                self._fail(loss.error(self.members, self._rank, self._silence_s), _GRACE_S)
            if kind not in (Frame.FAILED, Frame.LEFT):
                return
            about, words = int.from_bytes(text[:_RANK_BYTES], "little"), text[_RANK_BYTES:][:FAILURE_BYTES]
            self._check_speaker(rank, [about])
            self._send_all(kind, about.to_bytes(_RANK_BYTES, "little") + words, but=rank)
            if kind is Frame.LEFT:
                self._left[about] = words.decode(errors="replace")
                if self._watcher is not None:
                    self._watcher.leave(about)
            else:
                self._fail(self._reported_failure(about, words.decode(errors="replace")), 0.0)

    def _receive_figures(self, rank: int, text: bytes) -> None:
        """Keep what a rank reports it has done, or forward it towards the hub."""
        about = int.from_bytes(text[:_RANK_BYTES], "little")
        if rank == self._parent or len(text) > _RANK_BYTES + _MOST_FIGURES_BYTES:
            raise ValueError("figures that are not for this rank")
        self._check_speaker(rank, [about])
        if self._parent is not None:
            self._pass_on(text)
        elif self._watcher is not None:
            self._watcher.take(about, text[_RANK_BYTES:])

    def _lose_sight(self, ranks: Sequence[int]) -> None:
        if self._watcher is not None:
            for rank in ranks:
                self._watcher.lose(rank)

    def _check_speaker(self, rank: int, about: Sequence[int]) -> None:
        if rank != self._parent and not self._below[rank].issuperset(about):
            raise ValueError(f"it speaks for {format_ranks(about)}")

    # --- failures ---

    def _end(self, rank: int, error: OSError) -> None:
        with self._lock:
            if rank not in self._connections:
                return
            quiet = quiet_s(self._connections[rank].socket)
            if error.errno in _UNREACHABLE:
                self._lose(rank, How.SILENT)
            elif quiet >= _QUIET_S:
                self._lose(
                    rank, How.SILENT, f"the connection ended after {quiet:.1f} s without a sign of life"
                )
            elif error.errno is None:
                self._lose(rank, How.ENDED if not str(error) else How.UNREADABLE, str(error))
            elif error.errno not in _RESET:
                self._lose(rank, How.ENDED)
            elif self._drop(rank):
                beside = [other for other in self._ranks_beside(rank) if other in self._connections]
                for other in beside:  # a firewall that resets connections does so when it sees a segment
                    self._send(other, Frame.BEAT, b"")
                sent = {other: self._num_said[other] for other in beside}
                self._reset[rank] = _Reset(time.monotonic(), sent)
                self._judges_at_s = min(self._judges_at_s, self._reset[rank].at_s + _RESET_GRACE_S)

    def _judge_reset(self, rank: int, now: float) -> None:
        """Decide whether a reset connection means that the process died.

        A process that dies with unread data resets its connection. A firewall resets all connections of the
        host, and so does the other end when it drops them because the link is cut in one direction. It is a
        death if the kernel of that host acknowledges what is sent to the other ranks there.
        """
        reset = self._reset[rank]
        others = [
            (progress, sent)
            for other, sent in reset.sent.items()
            if other in self._connections and (progress := self._progress_to(other)) is not None
        ]
        is_there = bool(others) and all(progress.confirmed >= sent for progress, sent in others)
        if now < reset.at_s + (_RESET_GRACE_S if is_there or not others else self._silence_s):
            self._judges_at_s = min(
                self._judges_at_s, max(now + _CONFIRM_EVERY_S, reset.at_s + _RESET_GRACE_S)
            )
            return
        del self._reset[rank]
        if is_there:
            self._report_loss(Loss([rank], How.ENDED.value, self._rank))
            return
        beside = [other for other in self._ranks_beside(rank) if other != rank]
        lost = [rank, *(each for each in beside if self._reset.pop(each, None) is not None)]
        self._report_loss(Loss(sorted(lost), How.RESET.value, self._rank))

    def _lose(self, rank: int, how: How, said: str = "") -> None:
        with self._lock:
            if how is How.SILENT:
                self._give_up(rank)
            if not self._drop(rank):
                return
            lost = [rank]
            if how is How.SILENT:
                # Silence means that a host's kernel does not answer, so all of its ranks are lost.
                lost = [each for each in self._ranks_beside(rank) if each not in self._left]
                for other in lost:
                    self._give_up(other)
                    self._drop(other)
            self._report_loss(Loss(lost, how.value, self._rank, said))

    def _give_up(self, rank: int) -> None:
        """Notify the other end why its connection ends; it may receive that if this end receives nothing.

        All connections with a host must end this way, and together. If one end were left over, its kernel
        would send unacknowledged data again, which would look like a sign of life from a dropped rank.
        """
        if rank not in self._connections:
            return
        self._send(rank, Frame.GAVE_UP, b"")
        with contextlib.suppress(OSError):
            reset = struct.pack("ii", 1, 0)  # reset at once; do not try to send the rest for minutes
            self._connections[rank].socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

    def _drop(self, rank: int) -> bool:
        connection = self._connections.pop(rank, None)
        if connection is None:
            return False
        self._arrivals.forget(rank)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        return rank not in self._left and not self._is_closed

    def _ranks_beside(self, rank: int) -> list[int]:
        return next(list(ranks) for ranks in self._hosts if rank in ranks)

    def _report_loss(self, loss: Loss) -> None:
        self._send_all(Frame.DIED, loss.pack())
        self._lose_sight(loss.ranks)
        self._fail(loss.error(self.members, self._rank, self._silence_s), _GRACE_S)

    def _fail(self, error: CollectiveError, within_s: float) -> None:
        if self.failure is None and not self._has_reported:
            self.failure = error
            self._lose_sight(_lost_by(error))
            self._calls_at_s = time.monotonic() + within_s
            self._has_failed.set()
            self._liveness.stop_asking()

    def _reported_failure(self, rank: int, text: str) -> CollectiveError:
        """The failure that another rank has reported, with the hosts of the ranks that it blames."""
        reporter = self.members[rank] if rank < len(self.members) else Member(rank, "?", 0)
        error = unpack_failure(PeerLostError("", seen=text), f"told by {reporter.describe()}")
        others = [*error.fields.get("lost", ()), *error.fields.get("late", ())]
        named = [each.describe() for each in self.members if each.rank in others and each.rank != rank]
        if not named:
            return error
        rows = {row: getattr(error, row) for row in ("where", "likely", "hint")}
        seen = f"{error.seen}\nto blame: {', '.join(named)}"
        return type(error)(error.summary, seen=seen, **rows, **error.fields)

    # --- sending; under the lock ---

    def _progress_to(self, rank: int) -> Progress | None:
        """How many bytes sent to a neighbour have arrived; see `LivenessCheck`."""
        sent = self._num_said[rank]
        if rank in self._reset:
            return Progress(sent, 0)
        if rank not in self._connections:
            return None
        return Progress(
            sent, sent - len(self._unsent[rank]) - unconfirmed_bytes(self._connections[rank].socket)
        )

    def _send_all(self, kind: Frame, text: bytes, but: int = -1) -> None:
        """Send to all neighbours except the one that it came from; in a tree this reaches every rank."""
        for rank in list(self._connections):
            if rank != but:
                self._send(rank, kind, text)

    def _pass_on(self, figures: bytes) -> None:
        if self._parent is not None and not self._unsent.get(self._parent):
            self._send(self._parent, Frame.FIGURES, figures)

    def _send(self, rank: int, kind: Frame, text: bytes) -> None:
        """Send now. In a signal handler that interrupted a send: queue it to follow that one."""
        self._to_send.append((rank, kind, text))
        while self._to_send and not self._is_sending:
            self._is_sending = True
            try:
                while self._to_send:
                    self._send_now(*self._to_send.popleft())
            finally:
                self._is_sending = False

    def _send_now(self, rank: int, kind: Frame, text: bytes) -> None:
        connection = self._connections.get(rank)
        if connection is None or len(self._unsent[rank]) > _MOST_UNSENT_BYTES:
            return
        self._put(rank, connection.say(kind, text))

    def _put(self, rank: int, data: bytes) -> None:
        self._unsent[rank] += data
        self._num_said[rank] += len(data)
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        try:
            sent = self._connections[rank].socket.send(self._unsent[rank])
            self._unsent[rank] = self._unsent[rank][sent:]
        except ConnectionResetError:
            self._reset_while_sending.add(rank)
        except OSError:  # full: sent with the next heartbeat; broken: the thread will notice
            pass

    def forget_in_child(self) -> None:
        """A forked child must not keep the connections open: they must end with the process of the rank."""
        self._release()
        self._connections = {}


def _lost_by(error: BaseException) -> Sequence[int]:
    found: Sequence[int] = error.fields.get("lost", ()) if isinstance(error, PacelineError) else ()
    return found


def _serve(channel: weakref.ref[ControlChannel]) -> None:
    while (strong := channel()) is not None:
        if not strong._turn():
            return
        del strong


def _prepare(connection: socket.socket) -> None:
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NEVER_MS),
        # The kernel probes where nothing is sent: from a rank to the hub, and to a rank that reads nothing.
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    )
    for option in options:
        connection.setsockopt(*option)


_is_installed = False


def _forget_in_children(channel: ControlChannel) -> None:
    global _is_installed
    if not _is_installed:
        _is_installed = True
        os.register_at_fork(after_in_child=_forget_all)
    _channels.add(channel)


def _forget_all() -> None:
    for channel in list(_channels):
        channel.forget_in_child()
