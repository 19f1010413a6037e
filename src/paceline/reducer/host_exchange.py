"""One rank's share of each bucket on its way to the other hosts and back; see `hosts` for the words.

The one idea: whoever runs the backward sums and sends, and one thread waits, adds up and publishes. It has to
be a thread, because a transport tells that a message has come only to who waits for it; its waits let
Python's lock go. So messages travel while the backward goes on.

Steps of a bucket, on each rank
1. `_make_ready`: receives are begun; those of the first buckets of a pass before it, as far as there is
   memory. An engine may ask the receiver for room before it sends, and then it need not wait for the answer.
   The thread begins them when the pass before has ended; where there are few, while messages of that pass
   are still on their way and nobody runs: two threads that hand Python's lock to and fro take longer than the
   work itself (0.3 to 0.6 ms of a pass of 100 kB).
2. `launch`: the share is summed over the host's ranks piece by piece, and sent.
3. The thread: in one round the pieces of all blocks are published as they come. In two, those of this host's
   part are added up and sent on, the next bucket's come first if there is one, and then the parts of the
   others are published.
4. The thread waits for what was sent: until then its memory is not free. Then the next bucket may have it.

Memory: a few buckets are under way at a time (WINDOW), each in a *room* of its own for what is sent and what
is received: together about WINDOW * 2 to 3 shares of the largest bucket, whatever the size of the model.
There are two at least, so that a model of one bucket can receive that of the next pass. A bucket has the same
room in every pass (that of a model of one bucket takes turns), so its messages are laid out once, when it
first comes, and a pass only writes their headers and begins them. Python is slow there: it runs between
megabytes that leave nothing of it in the caches.

Imports numpy, the core, rendezvous, `errors` and its neighbours.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product
from typing import TypeAlias

import numpy as np

from paceline import _core
from paceline.errors import CollectiveError, DeadlineError, MismatchError, PeerLostError, format_ranks
from paceline.reducer.engine_waits import is_of_a_late_peer, is_of_a_lost_peer
from paceline.reducer.hosts import (
    HEADER_BYTES,
    Begin,
    Blocks,
    Envelope,
    Header,
    HostsTransport,
    Message,
    Route,
    Transfer,
    tag_of,
    turns_of,
)
from paceline.reducer.sum_formats import SumFormat
from paceline.rendezvous import lifetime
from paceline.rendezvous.control import ControlChannel
from paceline.rendezvous.told_failures import pack_failure, unpack_failure

WINDOW = 4
_LOOK_S = 0.05  # how often who waits for free memory looks whether the host's group is over
_FEW_MESSAGES = 8  # of a pass: then their receives are begun in the pass before it
_SHOWN = 300  # characters of a transport's own words
_TOLD_WITHIN_S = 0.5  # after a connection broke: by then the control channel knows why


def patience_s(timeout_s: float) -> float:
    """How long to wait for a message, where ranks of one host wait `timeout_s` for each other.

    A little longer: a partner may be waiting for a rank of its own host, and it alone knows which. It has
    given up by then, and told.
    """
    return timeout_s + min(2.0, timeout_s / 2)


class _Sent:
    """A message that this rank makes, in every pass anew.

    Attributes:
        block: Whose sums it holds.
        elements: Which ones.
        payload: The address behind the header.
        envelope: The header.
        reports: Where reports stand in it; None: it has none.
        ways: The hosts that it goes to, and what sends it there.
    """

    __slots__ = ("block", "elements", "envelope", "payload", "reports", "ways")

    def __init__(self, block: int, elements: range, payload: int, envelope: Envelope) -> None:
        self.block, self.elements = block, elements
        self.payload, self.envelope = payload, envelope
        self.reports: Message | None = None
        self.ways: list[tuple[int, Begin]] = []


class _Received:
    """A message that another host makes, in every pass anew.

    Attributes:
        host: The number of the host that sends it.
        memory: The whole message.
        begin: Begins to receive it.
        transfer: The one that is under way in this pass.
        block, elements, payload, envelope, reports: As in `_Sent`.
    """

    __slots__ = (
        "begin",
        "block",
        "elements",
        "envelope",
        "host",
        "memory",
        "payload",
        "reports",
        "transfer",
    )

    def __init__(
        self,
        host: int,
        block: int,
        elements: range,
        memory: Message,
        payload: int,
        envelope: Envelope,
        begin: Begin,
    ) -> None:
        self.host, self.block, self.elements = host, block, elements
        self.memory, self.payload, self.envelope = memory, payload, envelope
        self.begin = begin
        self.reports: Message | None = None
        self.transfer: Transfer | None = None


_Either: TypeAlias = "_Sent | _Received"


class _Flight:
    """A bucket under way: its messages, in one room.

    Attributes:
        number: The pass in which it is under way.
        bucket: In the plan.
        room: The number of the room.
        is_one_round: See `Route`.
        has_report: Whether the reports of a pass travel beside it.
        own: What this rank has summed, in the order in which it is sent.
        pieces: For each piece of this host's part, the messages of all blocks, in their order.
        arriving: What comes in the first round.
        added: Sums over all hosts, of this host's part, which are sent in the second round.
        later: What comes in the second round.
        sends: Transfers of this pass whose memory is not free yet, with the host that they go to.
        weights: The weight of each block in this pass, as far as it is known.
    """

    def __init__(self, bucket: int, room: int, route: Route, *, has_report: bool, num_blocks: int) -> None:
        self.number, self.bucket, self.room = 0, bucket, room
        self.is_one_round, self.has_report = route.is_one_round, has_report
        self.own: list[_Sent] = []
        self.pieces: list[list[_Either]] = []
        self.arriving: list[_Received] = []
        self.added: list[_Sent] = []
        self.later: list[_Received] = []
        self.sends: list[tuple[int, Transfer]] = []
        self.weights = [0.0] * num_blocks

    def begin(self, number: int) -> None:
        """Forget the pass before, whose messages have all ended."""
        self.number = number
        self.sends.clear()
        self.weights[:] = [0.0] * len(self.weights)


class _Layout:
    """Cuts a room into messages."""

    def __init__(self, memory: Message) -> None:
        self._memory, self._address = memory, int(memory.ctypes.data)
        self._used = 0

    def take(self, nbytes: int) -> tuple[Message, int]:
        """Memory for a message, at a multiple of a cache line, and the address behind its header."""
        begin = self._used
        self._used += _aligned(nbytes)
        return self._memory[begin : begin + nbytes], self._address + begin + HEADER_BYTES


class _ReceiveNext:
    """Tells the thread to begin the receives of the next pass."""


_RECEIVE_NEXT = _ReceiveNext()


class HostExchange:
    """The `ShareExchange` of a rank that has partners. See the head of this file.

    Args:
        core: The part of this host.
        group: The memory of this host, whose other ranks are told of a failure.
        transport: To the partners.
        control: Tells all ranks of a failure of one.
        blocks: Whose sums go from host to host, and how they are added.
        routes: The way of this rank's share of each bucket.
        sums: How they stand in messages.
        reporting: The ranks whose reports travel beside the last bucket, of each host.
        report_bytes: Size of one report.
        generation: Number of the plan.
        who: This rank in words: "rank 1 of 4".
        where: A bucket in words, by number.
        timeout_s: Most seconds to wait for ranks of the host; see `patience_s` for a message.
        on_overflow: Called by the thread with (bucket, elements) whose mean is not finite.

    Attributes:
        failure: What has ended the exchange; None: it goes on.
    """

    def __init__(
        self,
        core: _core.HostSums,
        group: _core.HostGroup,
        transport: HostsTransport,
        control: ControlChannel,
        *,
        blocks: Blocks,
        routes: Sequence[Route],
        sums: SumFormat,
        reporting: Sequence[Sequence[int]],
        report_bytes: int,
        generation: int,
        who: str,
        where: Callable[[int], str],
        timeout_s: float,
        on_overflow: Callable[[int, range], None],
    ) -> None:
        self.failure: BaseException | None = None
        self._core, self._group, self._transport, self._control = core, group, transport, control
        self._routes, self._sums = routes, sums
        self._reporting, self._report_bytes = reporting, report_bytes
        self._generation = generation
        self._who, self._where = who, where
        self._timeout_s, self._patience_s = timeout_s, patience_s(timeout_s)
        self._on_overflow = on_overflow
        self._host, self._num_hosts = transport.host, len(transport.ranks)
        self._rank = transport.ranks[self._host]
        self._others = turns_of(self._host, self._num_hosts)
        self._blocks, self._in_order = blocks.blocks, blocks
        self._blocks_of: list[list[int]] = [[] for _ in range(self._num_hosts)]
        for number, block in enumerate(blocks.blocks):
            self._blocks_of[block.host].append(number)
        nbytes = max(self._bytes_of(bucket) for bucket in range(len(routes)))
        self._rooms = [np.empty(nbytes, np.uint8) for _ in range(min(WINDOW, max(2, len(routes))))]
        self._is_taken = [False] * len(self._rooms)
        self._laid_out: dict[tuple[int, int], _Flight] = {}  # by bucket and room
        # Of all steps but the last, whose result has its own place.
        most = max(
            sums.nbytes(bucket, len(piece))
            for bucket, route in enumerate(routes)
            for part in route.parts
            for piece in part
        )
        self._joined = [np.empty(most, np.uint8) for _ in blocks.steps[:-1]]
        self._is_free = threading.Condition()
        self._number = 1  # of the pass under way, or of the next one
        self._ready: deque[_Flight] = deque()  # of that pass, in the plan's order, not launched
        self._next_ready = 0  # its first bucket that has not been among them
        self._is_due = False  # its first receives are still to be begun, by the thread
        self._making = threading.Lock()  # of the four above
        self._has_few_messages = len(routes) == 1 and self._num_coming() <= _FEW_MESSAGES
        self._met: CollectiveError | None = None
        self._flights: queue.SimpleQueue[_Flight | _ReceiveNext | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-hosts", daemon=True)
        self._thread.start()
        control.at_failure(self._fail)
        lifetime.before_leaving(self.join)  # this rank's pass may be over, and its partner's not

    # --- the thread that runs the backward ---

    def end_pass(self) -> None:
        """All means are there. Let the thread begin to receive what partners send of the next pass.

        The thread, because nobody waits for it: the user's program goes on meanwhile.
        """
        if not self._has_few_messages:
            self._open_next_pass()
            self._flights.put(_RECEIVE_NEXT)

    def launch(
        self,
        bucket: int,
        note_nonfinite: Callable[[int, range], None],
        make_report: Callable[[], bytes] | None = None,
        *,
        may_wait: bool,
    ) -> bool:
        """See `ShareExchange.launch`."""
        with self._making:
            self._is_due = False
            if not self._ready:
                self._make_ready(may_wait=may_wait)
                if not self._ready:
                    return False
            flight = self._ready.popleft()
        assert flight.bucket == bucket and flight.has_report == (make_report is not None)
        self._send_sums(flight, note_nonfinite, make_report)
        self._flights.put(flight)
        return True

    def check(self) -> None:
        """Raise what has ended the exchange, if anything has."""
        if self.failure is not None:
            raise self.failure

    def give_up(self, error: BaseException) -> None:
        """This rank has failed: tell all others, and end all transfers. Does not block."""
        if self.failure is None:
            self.failure = error
        self._group.abort(pack_failure(error, self._rank))
        self._tell(error)
        self.stop()

    def stop(self) -> None:
        """End the thread, once it has nothing more to do. Does not block."""
        self._flights.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, and the memory of this host is not written any more."""
        self.stop()
        self._thread.join(self._timeout_s)

    def _make_ready(self, *, may_wait: bool) -> None:
        """Begin receives of the buckets that come next, as far as there is memory.

        Args:
            may_wait: Wait until there is memory for one, at most until the deadline.
        """
        if self._met is not None:
            raise self._met
        while self._next_ready < len(self._routes):
            flight = self._take_flight(self._next_ready, may_wait=may_wait and not self._ready)
            if flight is None:
                return
            for message in chain(flight.arriving, flight.later):
                message.transfer = self._begin(message.begin, message.host, flight.bucket)
            self._next_ready += 1
            self._ready.append(flight)

    def _take_flight(self, bucket: int, *, may_wait: bool) -> _Flight | None:
        """The messages of a bucket, once its room is free."""
        num_rooms, num_buckets = len(self._rooms), len(self._routes)
        room = (self._number if num_buckets < num_rooms else bucket) % num_rooms
        with self._is_free:
            self.check()
            if self._is_taken[room] and not may_wait:
                return None
            ends_s = time.monotonic() + self._patience_s + 1.0  # the thread's own deadline comes first
            while self._is_taken[room]:
                self._is_free.wait(_LOOK_S)
                self.check()
                self._group.check_usable()  # a rank of this host may have died meanwhile
                if time.monotonic() > ends_s:
                    raise self._late(self._others, "take earlier buckets", bucket)
            self._is_taken[room] = True
        flight = self._laid_out.get((bucket, room))
        if flight is None:
            flight = self._laid_out[bucket, room] = self._lay_out(bucket, room)
        flight.begin(self._number)
        return flight

    def _send_sums(
        self,
        flight: _Flight,
        note_nonfinite: Callable[[int, range], None],
        make_report: Callable[[], bytes] | None,
    ) -> None:
        bucket, core, sums = flight.bucket, self._core, self._sums
        for block in self._blocks_of[self._host]:
            flight.weights[block] = core.total_weight(self._blocks[block].local_ranks)
        waiting: list[_Sent] = []  # for a report to be put behind
        for message in flight.own:
            weight, elements, payload = flight.weights[message.block], message.elements, message.payload
            local_ranks = self._blocks[message.block].local_ranks
            room = sums.room(0, bucket, payload)
            if elements and not core.sum(bucket, elements.start, len(elements), local_ranks, room):
                note_nonfinite(bucket, elements)
            sums.write(0, bucket, elements, payload, weight)
            if message.reports is not None:
                waiting.append(message)
            else:
                self._send(flight, message, weight)
        if make_report is not None:
            report = np.frombuffer(make_report(), np.uint8)
            for message in waiting:
                assert message.reports is not None
                message.reports[:] = report
                self._send(flight, message, flight.weights[message.block])

    def _send(self, flight: _Flight, message: _Sent, weight: float) -> None:
        message.envelope.write(flight.number, weight)
        for host, begin in message.ways:
            flight.sends.append((host, self._begin(begin, host, flight.bucket)))

    def _begin(self, begin: Begin, host: int, bucket: int) -> Transfer:
        try:
            return begin()
        except RuntimeError as error:  # the connection has broken before
            raise self._lost(error, host, bucket) from error

    # --- the thread that waits ---

    def _run(self) -> None:
        try:
            with _core.DefaultFloats():  # sums of weights too are the same on all hosts
                self._wait_and_publish()
        except CollectiveError as error:
            self._fail(unpack_failure(error))  # another rank of this host may have told what it met
        except BaseException as error:
            self._fail(error)

    def _wait_and_publish(self) -> None:
        halfway: deque[_Flight] = deque()
        while (flight := self._next(halfway)) is not None:
            if flight in halfway:
                halfway.remove(flight)
                self._second_round(flight)
            else:
                if self._has_few_messages:  # they are on their way, and whoever runs the backward waits, too
                    self._open_next_pass()
                    self._receive_next()
                self._first_round(flight)
                if not flight.is_one_round:
                    halfway.append(flight)
                    continue
            self._core.count_share()
            for host, send in flight.sends:
                self._wait(send, host, flight)
            self._give_back(flight)

    def _next(self, halfway: deque[_Flight]) -> _Flight | None:
        """What was launched last comes before the second round of what came before it."""
        while True:
            try:
                flight = self._flights.get(block=not halfway)
            except queue.Empty:
                return halfway[0]
            if not isinstance(flight, _ReceiveNext):
                return flight
            self._receive_next()

    def _open_next_pass(self) -> None:
        """All buckets of this pass are launched: receives are those of the next one from now on."""
        self._number, self._next_ready, self._is_due = self._number + 1, 0, True

    def _receive_next(self) -> None:
        """Begin receives of the pass that comes next, unless it has come.

        Where a connection has broken meanwhile the next pass tells, because the one that has ended is good.
        """
        # Whoever holds it makes them itself, and may be waiting for memory that only this thread frees.
        if not self._making.acquire(blocking=False):
            return
        try:
            if self._is_due:
                self._make_ready(may_wait=False)
        except CollectiveError as error:
            self._met = error
        finally:
            self._is_due = False
            self._making.release()

    def _first_round(self, flight: _Flight) -> None:
        bucket, sums = flight.bucket, self._sums
        total = 0.0
        for piece, messages in enumerate(flight.pieces):
            elements = messages[0].elements
            found = []
            for message in messages:
                block = message.block
                if isinstance(message, _Received):
                    weight = self._arrived(flight, message)
                    if piece == 0:
                        flight.weights[block] = weight
                    elif weight != flight.weights[block]:
                        raise self._mismatch(message, f"weight {flight.weights[block]}")
                    if message.reports is not None:
                        self._take_reports(message.host, message.reports)
                weight = flight.weights[block]
                found.append(sums.read(bucket, len(elements), message.payload, weight, block))
            if piece == 0:
                total = self._in_order.add(flight.weights)
            found = self._join(bucket, found, len(elements)) if elements else found
            if flight.is_one_round:
                self._publish(bucket, elements, found, total)
            else:
                added = flight.added[piece]
                if elements:
                    room = sums.room(1, bucket, added.payload)
                    self._core.add_sums(bucket, found, len(elements), room)
                sums.write(1, bucket, elements, added.payload, total)
                self._send(flight, added, total)

    def _join(self, bucket: int, sums: list[int], count: int) -> list[int]:
        """Add in steps, up to the two of the last one; with no steps, nothing has to be done."""
        steps = self._in_order.steps
        if not steps:
            return sums
        found = list(sums)
        for (left, right), room in zip(steps, self._joined):
            address = int(room.ctypes.data)
            self._core.add_sums(bucket, [found[left], found[right]], count, address)
            found.append(address)
        left, right = steps[-1]
        return [found[left], found[right]]

    def _take_reports(self, host: int, reports: Message) -> None:
        """Lay what the ranks of a host tell of their pass where all ranks of this one read it."""
        rows = reports.reshape(-1, self._report_bytes)
        for rank, report in zip(self._reporting[host], rows, strict=True):
            self._core.write_slot(rank, report.tobytes())

    def _second_round(self, flight: _Flight) -> None:
        bucket, total = flight.bucket, self._in_order.add(flight.weights)
        for message in chain[_Either](flight.added, flight.later):
            if isinstance(message, _Received):
                self._arrived(flight, message)
            elements = message.elements
            # This host's own part, too, as the others read it.
            sums = self._sums.read(bucket, len(elements), message.payload, total, 0)
            self._publish(bucket, elements, [sums], total)

    def _arrived(self, flight: _Flight, message: _Received) -> float:
        """Wait for a message, and see that it is the right one; its weight."""
        assert message.transfer is not None
        self._wait(message.transfer, message.host, flight)
        weight = message.envelope.weight_in(flight.number)
        if weight is None:
            raise self._mismatch(message, str(message.envelope.header(flight.number)))
        return weight

    def _wait(self, transfer: Transfer, host: int, flight: _Flight) -> None:
        try:
            transfer.wait(self._patience_s)
        except RuntimeError as error:
            raise self._lost(error, host, flight.bucket, self._silent(flight)) from error

    def _publish(self, bucket: int, elements: range, sums: list[int], total: float) -> None:
        if elements and not self._core.publish(bucket, elements.start, len(elements), sums, total):
            self._on_overflow(bucket, elements)

    def _give_back(self, flight: _Flight) -> None:
        with self._is_free:
            self._is_taken[flight.room] = False
            self._is_free.notify()

    # --- failures ---

    def _fail(self, error: BaseException) -> None:
        """Tell this rank's own backward, and the other ranks of the host."""
        with self._is_free:
            if self.failure is not None:  # a consequence
                return
            self.failure = error
            self._is_free.notify_all()
        self._group.abort(pack_failure(error, self._rank))
        self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Tell all hosts the reason, then end the connections, so that the partners wake."""
        self._control.tell(error)
        self._transport.abort()

    def _silent(self, flight: _Flight) -> list[int]:
        """Hosts from which some message of this bucket has not begun to come."""
        return [
            message.host
            for message in chain(flight.arriving, flight.later)
            if not message.envelope.has_begun_to_come(flight.number)
        ]

    def _lost(
        self, error: RuntimeError, host: int, bucket: int, silent: Sequence[int] = ()
    ) -> CollectiveError:
        text, partner = str(error)[:_SHOWN], self._transport.name(host)
        if is_of_a_late_peer(text):
            # Who is waited for may itself be waiting for another one that is silent.
            return self._late(dict.fromkeys([host, *silent]), "average gradients", bucket, text)
        if (told := self._control.wait(_TOLD_WITHIN_S)) is not None:
            return told
        if (stopped := self._not_answering("average gradients", bucket, text)) is not None:
            return stopped  # the partner has given up on it, and nobody could be told
        if (told := self._control.failure) is not None:
            return told
        is_lost = is_of_a_lost_peer(text)
        return (PeerLostError if is_lost else CollectiveError)(
            f"{self._who.capitalize()} lost {partner}."
            if is_lost
            else f"{self._who.capitalize()} could not exchange gradients with {partner}.",
            where=self._where(bucket),
            seen=text,
            likely="it died or raised, or the network between the hosts broke" if is_lost else "",
            hint="look at that rank's own output, which tells the reason",
            lost=(self._transport.ranks[host],) if is_lost else (),
        )

    def _late(self, hosts: Iterable[int], doing: str, bucket: int, text: str = "") -> DeadlineError:
        if (stopped := self._not_answering(doing, bucket, text)) is not None:
            return stopped  # partners may be waiting for it, too
        names = " and ".join(map(self._transport.name, hosts))
        return DeadlineError(
            f"{self._who.capitalize()} gave up waiting for {names} to {doing} after "
            f"{self._patience_s:.1f} s.",
            where=self._where(bucket),
            seen=text,
            likely="that rank skipped this backward, is stuck in its data loader, was stopped, or its host "
            "cannot be reached any more",
            hint="look at that rank's own output; `timeout_s` gives it longer",
            late=tuple(self._transport.ranks[host] for host in hosts),
        )

    def _not_answering(self, doing: str, bucket: int, text: str) -> DeadlineError | None:
        """The error for ranks whose processes do not run, if there are any."""
        late = self._control.late(is_silent=True)
        if late is None:
            return None
        return DeadlineError(
            f"{self._who.capitalize()} gave up waiting for {format_ranks(late.ranks)} to {doing}.",
            where=self._where(bucket),
            seen="\n".join(filter(None, [late.seen, text])),
            likely=late.likely,
            hint=late.hint,
            late=late.ranks,
        )

    def _mismatch(self, message: _Received, expected: str) -> MismatchError:
        header = Header.read(message.memory)
        return MismatchError(
            f"{self._who.capitalize()} got another message from {self._transport.name(message.host)} than it "
            "waits for.",
            expected=expected,
            got="no header of a message" if header is None else f"{header}, weight {header.weight}",
            likely="the ranks of these hosts are not in the same pass of the same model",
            hint="run the same backwards in the same order on every rank; nothing was averaged",
        )

    # --- messages, and their sizes ---

    def _lay_out(self, bucket: int, room: int) -> _Flight:
        """All messages of a bucket in a room."""
        route, host, last = self._routes[bucket], self._host, bucket == len(self._routes) - 1
        flight = _Flight(bucket, room, route, has_report=last, num_blocks=len(self._blocks))
        layout = _Layout(self._rooms[room])
        one_round, mine = route.is_one_round, route.part_of(host)
        own: dict[int, list[_Sent]] = {}
        # This rank's own part last: nobody waits for it.
        for part in [0] if one_round else [*self._others, host]:
            to = self._others if one_round else [part] if part != host else []
            own[part] = self._lay_out_sent(bucket, layout, 0, self._messages_of(host, route.parts[part]), to)
            flight.own += own[part]
        arriving: dict[int, list[_Received]] = {}
        for other in self._others:
            coming = self._messages_of(other, mine)
            arriving[other] = self._lay_out_received(bucket, layout, other, 0, coming, has_report=last)
            flight.arriving += arriving[other]
            if not one_round:
                theirs = [(0, elements) for elements in route.parts[other]]
                flight.later += self._lay_out_received(bucket, layout, other, 1, theirs, has_report=False)
        if not one_round:
            added = [(0, elements) for elements in mine]
            flight.added = self._lay_out_sent(bucket, layout, 1, added, self._others)
        for piece in range(len(mine)):
            row: list[_Either] = []
            for number, block in enumerate(self._blocks):
                index = self._blocks_of[block.host].index(number) * len(mine) + piece
                from_own = own[0 if one_round else host]
                row.append(from_own[index] if block.host == host else arriving[block.host][index])
            flight.pieces.append(row)
        return flight

    def _lay_out_sent(
        self,
        bucket: int,
        layout: _Layout,
        phase: int,
        going: Sequence[tuple[int, range]],
        to: Sequence[int],
    ) -> list[_Sent]:
        """What this rank sends in a round, (block, elements) each, to some hosts."""
        found = []
        for piece, (block, elements) in enumerate(going):
            is_last = piece == len(going) - 1 and bucket == len(self._routes) - 1
            reporting = self._host if is_last and not phase else None
            memory, payload = layout.take(self._message_bytes(bucket, elements, reporting))
            envelope = Envelope(memory, self._generation, bucket, phase, self._host, piece)
            message = _Sent(block, elements, payload, envelope)
            message.reports = self._reports_in(memory, reporting)
            tag = tag_of(bucket, phase, piece, self._generation)
            message.ways = [(host, self._transport.sending(host, memory, tag)) for host in to]
            found.append(message)
        return found

    def _lay_out_received(
        self,
        bucket: int,
        layout: _Layout,
        host: int,
        phase: int,
        coming: Sequence[tuple[int, range]],
        *,
        has_report: bool,
    ) -> list[_Received]:
        """What another host sends in a round, (block, elements) each."""
        found = []
        for piece, (block, elements) in enumerate(coming):
            reporting = host if has_report and piece == len(coming) - 1 else None
            memory, payload = layout.take(self._message_bytes(bucket, elements, reporting))
            envelope = Envelope(memory, self._generation, bucket, phase, host, piece)
            tag = tag_of(bucket, phase, piece, self._generation)
            begin = self._transport.receiving(host, memory, tag)
            message = _Received(host, block, elements, memory, payload, envelope, begin)
            message.reports = self._reports_in(memory, reporting)
            found.append(message)
        return found

    def _reports_in(self, message: Message, host: int | None) -> Message | None:
        return None if host is None else message[len(message) - self._reports_bytes(host) :]

    def _messages_of(self, host: int, pieces: Sequence[range]) -> list[tuple[int, range]]:
        """What a host sends of a part in the first round: blocks, and their elements."""
        return list(product(self._blocks_of[host], pieces))

    def _num_coming(self) -> int:
        """Messages that come in a pass."""
        num = 0
        for route, other in product(self._routes, self._others):
            num += len(self._messages_of(other, route.part_of(self._host)))
            num += 0 if route.is_one_round else len(route.parts[other])
        return num

    def _message_bytes(self, bucket: int, elements: range, reporting: int | None = None) -> int:
        """`reporting`: The host whose ranks' reports it has; None: it has none."""
        reports = 0 if reporting is None else self._reports_bytes(reporting)
        return HEADER_BYTES + self._sums.nbytes(bucket, len(elements)) + reports

    def _reports_bytes(self, host: int) -> int:
        return len(self._reporting[host]) * self._report_bytes

    def _bytes_of(self, bucket: int) -> int:
        """All messages of a bucket, with a report behind each that may have one."""
        route, own, all_blocks = self._routes[bucket], len(self._blocks_of[self._host]), len(self._blocks)
        most = max(range(self._num_hosts), key=self._reports_bytes)

        def size(pieces: Sequence[range]) -> int:
            return sum(_aligned(self._message_bytes(bucket, piece, most)) for piece in pieces)

        mine, everything = size(route.part_of(self._host)), sum(map(size, route.parts))
        first = own * everything + (all_blocks - own) * mine
        return first if route.is_one_round else first + everything  # the second round's, of all parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES
