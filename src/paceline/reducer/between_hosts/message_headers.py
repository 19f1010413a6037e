"""The messages between hosts, their headers, and the interface of a transport for them.

A rank that receives another header than the expected one raises, so that a wrong pairing never makes a wrong
mean. Messages are paired by tags, so buckets need no order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

Message = np.ndarray[Any, np.dtype[np.uint8]]
"""The bytes of one message: header, payload, and reports behind it, if it has any."""

HEADER_BYTES = 64
"""A cache line, so that the payload behind it is aligned."""
PLANS = 1 << 16
"""Models that share connections use different generations: generation = model * PLANS + plan."""
_PIECES_PER_TAG = 1 << 12
_BITS_OF_BUCKET = 28  # the bits of a tag for bucket, round and piece
_PLANS_PER_TAG = 8  # only few plans are in use at a time, and a tag is a positive number of 32 bits
_MAGIC = b"plh1"
_HEADER = struct.Struct("<4sHHIIIQdQ")


class Transfer(Protocol):
    """A message on its way. Its memory must not change until `wait` has returned."""

    def wait(self, timeout: Any, /) -> object:
        """Block until the message has been sent, or has arrived."""
        ...


Begin: TypeAlias = Callable[[], Transfer]
"""Begins to send or to receive a message. Raises RuntimeError if the connection has ended."""


class HostsTransport(Protocol):
    """Connects a rank to its peers on the other hosts.

    A message has the same memory, tag and peer in every backward. So it is prepared once, and each call of
    the function that `sending` or `receiving` returns begins it anew, after the previous transfer has ended.

    Attributes:
        host: Number of this rank's host, in the order of the hosts' lowest ranks.
        ranks: The peer on each host, and this rank itself for its own host.
        needs_headers: Whether the transport needs a header at the beginning of every message, to identify it.
        lets_signals_in: Whether signal handlers run while the main thread waits for a transfer.
    """

    host: int
    ranks: Sequence[int]
    needs_headers: bool
    lets_signals_in: bool

    def sending(self, host: int, message: Message, tag: int) -> Begin:
        """A function that sends a message to the peer on a host. It must not change before `wait` returns."""
        ...

    def receiving(self, host: int, message: Message, tag: int) -> Begin:
        """A function that receives the message of this tag and size from the peer on a host.

        Example:
            Host 0 calls sending(1, message, 7)(), host 1 receiving(0, buffer, 7)(); both wait; then the
            buffer of host 1 holds the message.
        """
        ...

    def timeout_of(self, timeout_s: float) -> Any:
        """Convert seconds to the argument of the transfers' `wait`; once, because there are many calls."""
        ...

    def name(self, host: int) -> str:
        """The peer in words: "rank 2 (host 1, node7)"."""
        ...

    def abort(self) -> None:
        """End all waits with an error; nothing can be sent any more. Not collective."""
        ...


@dataclass(frozen=True)
class Header:
    """The header of a message.

    Attributes:
        generation: Number of the reducer, among all whose messages use the same connections.
        number: The backward.
        bucket: The index in the plan.
        round: 0, or 1 for sums that their owner sends.
        host: The sender.
        piece: Number among what it sends in this round: all pieces of its first block, then of the next.
        weight: The sum of the weights of the block's ranks; in the second round, of all ranks.
        nbytes: The bytes behind the header.
    """

    generation: int
    number: int
    bucket: int
    round: int
    host: int
    piece: int
    weight: float
    nbytes: int

    @classmethod
    def read(cls, message: Message) -> Header | None:
        """None if the message does not begin with a header."""
        magic, phase, host, generation, bucket, piece, *rest = _HEADER.unpack_from(message.data)
        number, weight, nbytes = rest
        return (
            cls(generation, number, bucket, phase, host, piece, weight, nbytes) if magic == _MAGIC else None
        )

    def __str__(self) -> str:
        return (
            f"iteration {self.number}, bucket {self.bucket}, round {self.round}, piece {self.piece} of host "
            f"{self.host} ({self.nbytes} bytes), plan {self.generation}"
        )


class Envelope:
    """The header of a message that is sent or received with the same memory in every backward."""

    __slots__ = ("_expected", "_nbytes", "_view")

    def __init__(
        self, message: Message, generation: int, bucket: int, phase: int, host: int, piece: int
    ) -> None:
        self._view = message.data
        self._expected = (_MAGIC, phase, host, generation, bucket, piece)
        self._nbytes = len(message) - HEADER_BYTES
        message[: len(_MAGIC)] = 0

    def write(self, number: int, weight: float) -> None:
        _HEADER.pack_into(self._view, 0, *self._expected, number, weight, self._nbytes)

    def weight_in(self, number: int) -> float | None:
        """The weight in the header; None if this is not the expected message of that backward."""
        found = _HEADER.unpack_from(self._view)
        is_expected = found[:6] == self._expected and found[6] == number and found[8] == self._nbytes
        return float(found[7]) if is_expected else None

    def has_begun_to_come(self, number: int) -> bool:
        """Whether the header of this backward has arrived; the rest of the message may not have."""
        found = _HEADER.unpack_from(self._view)
        return bool(found[0] == _MAGIC and found[6] == number)

    def header(self, number: int, weight: float = 0.0) -> Header:
        _, phase, host, generation, bucket, piece = self._expected
        return Header(generation, number, bucket, phase, host, piece, weight, self._nbytes)


def tag_of(bucket: int, phase: int, piece: int, generation: int = 0) -> int:
    """The number that pairs a message with its receive, between two peers.

    It includes the plan, so that a receive begun under an earlier plan, for a backward that never happened,
    takes no message of this plan.
    """
    plan = generation % PLANS % _PLANS_PER_TAG
    return (plan << _BITS_OF_BUCKET) + (bucket * 2 + phase) * _PIECES_PER_TAG + piece


def lane_of(tag: int, lanes: int) -> int:
    """The connection, of several, that a message uses: consecutive messages use different ones.

    Messages of one tag in different backward passes use the same connection, and so stay in order.
    """
    return (tag // (2 * _PIECES_PER_TAG) + tag % _PIECES_PER_TAG) % lanes
