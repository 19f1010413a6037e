"""The messages of an in-flight bucket between hosts: laid out once, filled and sent in every backward.

A bucket has the same memory, peers and tags in every backward, so a backward only writes headers and begins
transfers. The two kinds of in-flight buckets are in `sum_messages` and `value_messages`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline import _core
from paceline.errors import CollectiveError
from paceline.reducer.between_hosts.compressed_sums import SumFormat
from paceline.reducer.between_hosts.host_sum_order import Blocks
from paceline.reducer.between_hosts.message_headers import (
    HEADER_BYTES,
    Begin,
    Envelope,
    HostsTransport,
    Message,
    Transfer,
)
from paceline.reducer.between_hosts.peer_waits import PeerWaits
from paceline.reducer.between_hosts.routes import Route, turns_of


@dataclass(frozen=True)
class Terms:
    """What all buckets of one rank have in common.

    Attributes:
        core: The part of the reducer in this host's memory.
        transport: Connects to the peers.
        waits: Waits for messages, and makes the errors.
        spans: Where each bucket is in the gradient buffer: its first byte, the one after its last, and the
            bytes of an element.
        routes: The route of this rank's shard of each bucket.
        sums: The format of sums in messages.
        blocks: The blocks whose sums go from host to host, and how they are added.
        reporting: For each host, the ranks whose reports travel with the last bucket.
        report_bytes: Size of one report.
        generation: Number of the plan.
        on_overflow: Called by the waiting thread with (bucket, elements) if their mean may not be finite.
        on_nonfinite: Called by the waiting thread with (bucket, elements, values, weights) if some gradient
            may not be finite there, before anything is overwritten. `values`: for each host, the address of
            the first of these elements; `weights`: the weights of the hosts.
    """

    core: _core.HostSums
    transport: HostsTransport
    waits: PeerWaits
    spans: Sequence[tuple[int, int, int]]
    routes: Sequence[Route]
    sums: SumFormat
    blocks: Blocks
    reporting: Sequence[Sequence[int]]
    report_bytes: int
    generation: int
    on_overflow: Callable[[int, range], None]
    on_nonfinite: Callable[[int, range, Sequence[int], Sequence[float]], None]

    @property
    def host(self) -> int:
        return self.transport.host

    @property
    def num_hosts(self) -> int:
        return len(self.transport.ranks)

    @property
    def others(self) -> list[int]:
        return turns_of(self.host, self.num_hosts)

    def is_last(self, bucket: int) -> bool:
        """Whether the reports of a backward travel with this bucket."""
        return bucket == len(self.routes) - 1

    def bytes_of_reports(self, host: int) -> int:
        return len(self.reporting[host]) * self.report_bytes

    def take_reports(self, host: int, reports: Message) -> None:
        """Write the reports of a host's ranks to where all ranks of this host can read them."""
        rows = reports.reshape(-1, self.report_bytes)
        for rank, report in zip(self.reporting[host], rows, strict=True):
            self.core.write_slot(rank, report.tobytes())


class Layout:
    """Allocates messages in a room."""

    def __init__(self, memory: Message) -> None:
        self._memory = memory
        self._address = int(memory.ctypes.data)
        self._used = 0

    def take(self, nbytes: int) -> tuple[Message, int]:
        begin = self._used
        self._used += aligned(nbytes)
        return self._memory[begin : begin + nbytes], self._address + begin


def aligned(nbytes: int) -> int:
    return -(-nbytes // HEADER_BYTES) * HEADER_BYTES


class Coming(Protocol):
    host: int
    begin: Begin
    transfer: Transfer | None


class Sent:
    """A message with a header that this rank fills and sends in every backward.

    Attributes:
        block: The block whose sums it holds.
        elements: The elements of these sums.
        memory: The whole message.
        payload: The address after the header.
        envelope: The header.
        reports: The memory for reports in the message; None: it has none.
        ways: The hosts that it goes to, and the function that sends it there.
    """

    __slots__ = ("block", "elements", "envelope", "memory", "payload", "reports", "ways")

    def __init__(
        self, block: int, elements: range, memory: Message, payload: int, envelope: Envelope
    ) -> None:
        self.block, self.elements = block, elements
        self.memory, self.payload, self.envelope = memory, payload, envelope
        self.reports: Message | None = None
        self.ways: list[tuple[int, Begin]] = []

    def put_reports(self, packed: bytes) -> None:
        """Write the packed reports of this host's ranks behind the payload."""
        assert self.reports is not None
        self.reports[:] = np.frombuffer(packed, np.uint8)


class Received:
    """A message with a header that another host sends in every backward."""

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


class InFlightBucket(ABC):
    """A bucket in flight, in one room.

    Attributes:
        bucket: Its index in the plan.
        number: The backward in which it is in flight.
        is_one_round: See `paceline.reducer.between_hosts.routes.Route`.
        has_report: Whether the reports of a backward travel with it.
    """

    def __init__(self, terms: Terms, bucket: int) -> None:
        self._terms, self._timeout = terms, terms.waits.timeout
        self.bucket, self.number = bucket, 0
        self.is_one_round = terms.routes[bucket].is_one_round
        self.has_report = terms.is_last(bucket)
        # The sends of this backward, with the hosts that they go to: their memory is not free yet.
        self._sends: list[tuple[int, Transfer]] = []

    def begin(self, number: int) -> None:
        self.number = number

    @abstractmethod
    def receive(self) -> None: ...

    @abstractmethod
    def send(
        self, note_nonfinite: Callable[[int, range], None], make_report: Callable[[], bytes] | None
    ) -> None: ...

    @abstractmethod
    def first_round(self) -> None:
        """Wait for the first messages. Then the means are there (one round), or are sent to the others."""

    @abstractmethod
    def second_round(self) -> None:
        """Wait for the means that other hosts send."""

    @abstractmethod
    def silent(self) -> Iterable[int]: ...

    def wait_sent(self) -> None:
        """Wait until this rank's messages are sent."""
        host, timeout = -1, self._timeout
        try:
            for host, send in self._sends:  # noqa: B007  # the error names it
                send.wait(timeout)
        except RuntimeError as error:
            raise self._lost(error, host) from error
        self._sends.clear()

    # These have loops inside, because each function call in Python takes about a microsecond.

    def _send(self, message: Sent, weight: float) -> None:
        message.envelope.write(self.number, weight)
        self._send_all(message.ways)

    def _send_all(self, ways: Iterable[tuple[int, Begin]]) -> None:
        host, sends = -1, self._sends
        try:
            for host, begin in ways:
                sends.append((host, begin()))
        except RuntimeError as error:  # the connection was broken before
            raise self._lost(error, host) from error

    def _receive_all(self, messages: Iterable[Coming]) -> None:
        host = -1
        try:
            for message in messages:
                host = message.host
                message.transfer = message.begin()
        except RuntimeError as error:
            raise self._lost(error, host) from error

    def _wait(self, message: Coming) -> None:
        assert message.transfer is not None
        try:
            message.transfer.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, message.host) from error
        message.transfer = None

    def _lost(self, error: RuntimeError, host: int) -> CollectiveError:
        return self._terms.waits.lost(error, host, self.bucket, self.silent())

    def _arrived_later(self, message: Received, weight: float) -> None:
        """As `_arrived`, for a further message of a host whose weight is known."""
        if self._arrived(message) != weight:
            raise self._terms.waits.mismatch(message.host, message.memory, f"weight {weight}")

    def _arrived(self, message: Received) -> float:
        """Wait for a message, check it, and take the reports in it; returns its weight."""
        self._wait(message)
        weight = message.envelope.weight_in(self.number)
        if weight is None:
            expected = str(message.envelope.header(self.number))
            raise self._terms.waits.mismatch(message.host, message.memory, expected)
        if message.reports is not None:
            self._terms.take_reports(message.host, message.reports)
        return weight
