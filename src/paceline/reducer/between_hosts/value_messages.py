"""In-flight buckets that exchange gradients, and not sums, between hosts of one rank each.

With one rank on each host nothing has to be summed before gradients are sent. So messages have the gradients'
own dtype, and the core computes the mean over these ranks: 16 bits stay 16 bits, with the bits of one host.

A large bucket goes from gradient buffer to gradient buffer, without a copy before it is sent
(`InFlightValues`). Each host owns a part of it:

    first round   the gradients of each part go from the gradient buffer to its owner, into a room there
    the owner     averages them with its own gradients, in place: its gradient buffer holds the mean
    second round  the mean goes from the owner's gradient buffer to every rank's

So of a bucket of S bytes each host reads and writes S / H once, and received messages need at most S bytes of
memory.

The mean of the second round may be received at any time. It is computed from what this rank sent in the first
round, so it cannot arrive before those gradients have left the memory that it overwrites. What this rank
sends in the second round must have left before the backward ends, as the gradients belong to the user then.

There is no room for a header in front of gradients, and each message costs a rank tens of microseconds,
including the handshake with the peer. So a backward has few headers, each a message of its own
(`ValuesBackward`): with the first such bucket, one that has the weight; with the last bucket of the plan, one
that has the reports; and when all means of a backward are computed, one that says whether they are finite.
Messages of one tag arrive in the order in which they were sent, and every backward sends each of them once:
if a backward begins with the right header, its other messages are paired correctly.

A small bucket is cheaper as one message with a header that every rank sends to every rank
(`InFlightFewValues`). Each host then computes the whole mean, and finds by itself what is not finite.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from paceline import _core
from paceline.reducer.between_hosts.message_headers import (
    HEADER_BYTES,
    Begin,
    Envelope,
    Message,
    Transfer,
    tag_of,
)
from paceline.reducer.between_hosts.messages import InFlightBucket, Layout, Received, Sent, Terms, aligned

_FINITE, _NOT_FINITE = 0, 1  # the byte behind the header in the second round


class ValuesBackward:
    """What the buckets that go from gradient buffer to gradient buffer share in a backward.

    Attributes:
        buckets: Their numbers. The header with the weight goes with the first one, and the header that says
            whether means are finite with the last one.
        weights: The weight of each host, complete after the header of the first bucket has arrived. The
            thread that runs the backward writes that of this host earlier; the waiting thread writes the
            others and reads all.
        is_finite: Whether all means that this host has computed so far are finite; for the waiting thread.
    """

    def __init__(self, terms: Terms) -> None:
        self.buckets = [
            number
            for number, route in enumerate(terms.routes)
            if route.is_of_values and not route.is_one_round
        ]
        self.weights = [0.0] * terms.num_hosts
        self.is_finite = True


class _Piece:
    __slots__ = ("begin", "host", "transfer")

    def __init__(self, host: int, begin: Begin) -> None:
        self.host, self.begin = host, begin
        self.transfer: Transfer | None = None


class _OwnPiece:
    __slots__ = ("coming", "elements", "values", "ways")

    def __init__(self, elements: range, values: list[int]) -> None:
        self.elements, self.values = elements, values
        self.coming: list[_Piece] = []
        self.ways: list[tuple[int, Begin]] = []


class InFlightValues(InFlightBucket):
    def __init__(self, terms: Terms, bucket: int, room: Message, shared: ValuesBackward) -> None:
        super().__init__(terms, bucket)
        begin, end, self._itemsize = terms.spans[bucket]
        self._gradient_buffer = _buffer_bytes(terms.core, begin, end)
        self._shared, self._weights = shared, shared.weights
        self._is_first = bucket == shared.buckets[0]
        self._going: list[tuple[int, Begin]] = []  # sends of gradients for the parts of other hosts
        self._pieces: list[_OwnPiece] = []
        self._later: list[_Piece] = []  # receives of the means of other hosts' parts
        layout = _MessageLayout(terms, bucket, Layout(room))
        self._header: Sent | None = None
        self._headers: list[Received] = []
        if self._is_first or self.has_report:
            reports = terms.bytes_of_reports if self.has_report else _none
            self._header, self._headers = layout.headers(0, reports)
        self._verdict: Sent | None = None
        self._verdicts: list[Received] = []
        if bucket == shared.buckets[-1]:
            self._verdict, self._verdicts = layout.headers(1, lambda host: 1)
        self._lay_out(layout)
        self._coming = [*chain(*(piece.coming for piece in self._pieces)), *self._later]

    @staticmethod
    def room_bytes(terms: Terms, bucket: int) -> int:
        most = max(1, *map(terms.bytes_of_reports, range(terms.num_hosts)))
        _, _, itemsize = terms.spans[bucket]
        mine = sum(aligned(len(piece) * itemsize) for piece in terms.routes[bucket].part_of(terms.host))
        return 2 * terms.num_hosts * aligned(HEADER_BYTES + most) + (terms.num_hosts - 1) * mine

    @staticmethod
    def num_coming(terms: Terms, bucket: int) -> int:
        route = terms.routes[bucket]
        mine = len(route.part_of(terms.host))
        return sum(2 + mine + len(route.parts[other]) for other in terms.others)

    def receive(self) -> None:
        self._receive_all(self._headers)
        self._receive_all(self._verdicts)
        self._receive_all(self._coming)

    def send(
        self, note_nonfinite: Callable[[int, range], None], make_report: Callable[[], bytes] | None
    ) -> None:
        host, core, blocks = self._terms.host, self._terms.core, self._terms.blocks.blocks
        weight = self._weights[host] = core.total_weight(blocks[host].local_ranks)
        if self._header is not None:
            if make_report is not None:
                self._header.put_reports(make_report())
            self._send(self._header, weight)
        self._send_all(self._going)

    def first_round(self) -> None:
        terms, shared = self._terms, self._shared
        if self._is_first:
            shared.is_finite = True
        for header in self._headers:
            if self._is_first:
                self._weights[header.host] = self._arrived(header)
            else:
                self._arrived_later(header, self._weights[header.host])
        total = terms.blocks.add(self._weights)
        for piece in self._pieces:
            for coming in piece.coming:
                self._wait(coming)
            if not _average(terms, self.bucket, piece.elements, piece.values, self._weights, total):
                shared.is_finite = False
            self._send_all(piece.ways)
        if self._verdict is not None:
            self._verdict.memory[HEADER_BYTES] = _FINITE if shared.is_finite else _NOT_FINITE
            self._send(self._verdict, total)

    def second_round(self) -> None:
        for piece in self._later:
            self._wait(piece)
        for verdict in self._verdicts:
            self._arrived(verdict)
            if verdict.memory[HEADER_BYTES] != _FINITE:
                self._look_at_means_of(verdict.host)
        self.wait_sent()  # the user may write to the gradient buffer from now on

    def _look_at_means_of(self, host: int) -> None:
        """Search a host's means for values that are not finite. Those of earlier buckets are still there."""
        for bucket in self._shared.buckets:
            for elements in self._terms.routes[bucket].parts[host]:
                self._terms.on_overflow(bucket, elements)

    def silent(self) -> Iterable[int]:
        return [
            *(
                header.host
                for header in chain(self._headers, self._verdicts)
                if not header.envelope.has_begun_to_come(self.number)
            ),
            *(piece.host for piece in self._coming if piece.transfer is not None),
        ]

    def _lay_out(self, layout: _MessageLayout) -> None:
        terms, transport, parts = self._terms, self._terms.transport, self._terms.routes[self.bucket].parts
        for number, elements in enumerate(parts[terms.host]):
            if not elements:
                continue
            own = self._in_buffer(elements)
            piece = _OwnPiece(elements, [int(own.ctypes.data)] * terms.num_hosts)
            for other in terms.others:
                room, piece.values[other] = layout.layout.take(len(own))
                piece.coming.append(_Piece(other, transport.receiving(other, room, layout.tag(0, number))))
                piece.ways.append((other, transport.sending(other, own, layout.tag(1, number))))
            self._pieces.append(piece)
        for other in terms.others:
            for number, elements in enumerate(parts[other]):
                if elements:
                    place = self._in_buffer(elements)
                    self._going.append((other, transport.sending(other, place, layout.tag(0, number))))
                    self._later.append(
                        _Piece(other, transport.receiving(other, place, layout.tag(1, number)))
                    )

    def _in_buffer(self, elements: range) -> Message:
        return self._gradient_buffer[elements.start * self._itemsize : elements.stop * self._itemsize]


class InFlightFewValues(InFlightBucket):
    """A small bucket, in one message from every rank to every rank."""

    def __init__(self, terms: Terms, bucket: int, room: Message) -> None:
        super().__init__(terms, bucket)
        begin, end, _ = terms.spans[bucket]
        self._elements = terms.routes[bucket].shard
        self._gradient_buffer = _buffer_bytes(terms.core, begin, end)
        self._weights = [0.0] * terms.num_hosts
        payload_bytes = functools.partial(self._payload_bytes, terms, bucket)
        self._sent, self._coming = _MessageLayout(terms, bucket, Layout(room)).headers(0, payload_bytes)
        self._values = [self._sent.payload] * terms.num_hosts
        self._sent.reports = _behind(self._sent.memory, end - begin)
        for message in self._coming:
            message.reports = _behind(message.memory, end - begin)
            self._values[message.host] = message.payload
        self._own = self._sent.memory[HEADER_BYTES : HEADER_BYTES + end - begin]

    @staticmethod
    def room_bytes(terms: Terms, bucket: int) -> int:
        hosts = range(terms.num_hosts)
        return sum(
            aligned(HEADER_BYTES + InFlightFewValues._payload_bytes(terms, bucket, host)) for host in hosts
        )

    @staticmethod
    def num_coming(terms: Terms, bucket: int) -> int:
        return len(terms.others)

    @staticmethod
    def _payload_bytes(terms: Terms, bucket: int, host: int) -> int:
        begin, end, _ = terms.spans[bucket]
        return end - begin + (terms.bytes_of_reports(host) if terms.is_last(bucket) else 0)

    def receive(self) -> None:
        self._receive_all(self._coming)

    def send(
        self, note_nonfinite: Callable[[int, range], None], make_report: Callable[[], bytes] | None
    ) -> None:
        host, core, blocks = self._terms.host, self._terms.core, self._terms.blocks.blocks
        weight = self._weights[host] = core.total_weight(blocks[host].local_ranks)
        self._own[:] = self._gradient_buffer
        if make_report is not None:
            self._sent.put_reports(make_report())
        self._send(self._sent, weight)

    def first_round(self) -> None:
        for message in self._coming:
            self._weights[message.host] = self._arrived(message)
        total = self._terms.blocks.add(self._weights)
        _average(self._terms, self.bucket, self._elements, self._values, self._weights, total)

    def second_round(self) -> None: ...

    def silent(self) -> Iterable[int]:
        return [each.host for each in self._coming if not each.envelope.has_begun_to_come(self.number)]


def _average(
    terms: Terms,
    bucket: int,
    elements: range,
    values: list[int],
    weights: list[float],
    total: float,
) -> bool:
    """Compute the mean of some elements of a bucket; returns whether all of it is finite."""
    core, count, (_, _, itemsize) = terms.core, len(elements), terms.spans[bucket]
    done, is_finite = core.average(
        bucket, elements.start, count, values, weights, total, stops_at_nonfinite=True
    )
    if done < count:
        rest = elements[done:]
        values = [address + done * itemsize for address in values]
        terms.on_nonfinite(bucket, rest, values, weights)
        core.average(bucket, rest.start, len(rest), values, weights, total, stops_at_nonfinite=False)
        is_finite = False
    if not is_finite:
        terms.on_overflow(bucket, elements)
    return is_finite


class _MessageLayout:
    def __init__(self, terms: Terms, bucket: int, layout: Layout) -> None:
        self._terms, self._bucket, self.layout = terms, bucket, layout

    def headers(self, phase: int, payload_bytes: Callable[[int], int]) -> tuple[Sent, list[Received]]:
        terms, transport = self._terms, self._terms.transport
        tag = tag_of(self._bucket, phase, 0, terms.generation)
        memory, payload, envelope = self._header(phase, terms.host, payload_bytes)
        sent = Sent(terms.host, range(0), memory, payload, envelope)
        sent.reports = _behind(memory)
        sent.ways = [(other, transport.sending(other, memory, tag)) for other in terms.others]
        received = []
        for other in terms.others:
            memory, payload, envelope = self._header(phase, other, payload_bytes)
            begin = transport.receiving(other, memory, tag)
            received.append(Received(other, other, range(0), memory, payload, envelope, begin))
            if phase == 0:
                received[-1].reports = _behind(memory)
        return sent, received

    def tag(self, phase: int, piece: int) -> int:
        """The tag of the piece with this number in its part; piece number 0 of a tag is for headers."""
        return tag_of(self._bucket, phase, piece + 1, self._terms.generation)

    def _header(
        self, phase: int, host: int, payload_bytes: Callable[[int], int]
    ) -> tuple[Message, int, Envelope]:
        memory, address = self.layout.take(HEADER_BYTES + payload_bytes(host))
        envelope = Envelope(memory, self._terms.generation, self._bucket, phase, host, 0)
        return memory, address + HEADER_BYTES, envelope


def _buffer_bytes(core: _core.HostSums, begin: int, end: int) -> Message:
    memory = (ctypes.c_ubyte * (end - begin)).from_address(core.buffer_pointer + begin)
    memory.owner = core  # type: ignore[attr-defined]
    found: Message = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    return found


def _behind(memory: Message, payload_bytes: int = 0) -> Message | None:
    begin = HEADER_BYTES + payload_bytes
    return memory[begin:] if len(memory) > begin else None


def _none(host: int) -> int:
    return 0
