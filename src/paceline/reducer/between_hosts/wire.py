"""What carries the messages between hosts, and what each of them says.

A rank that gets a header that is not what it waits for raises; a wrong pairing is never a wrong
mean. Messages pair by tags, so buckets need no order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

Message = np.ndarray[Any, np.dtype[np.uint8]]
"""The bytes of one message: header, payload, and a report behind it or none."""

HEADER_BYTES = 64
"""A cache line, so that the payload behind it is aligned."""
PLANS = 1 << 16
"""Models that share connections tell their messages apart: generation = model * PLANS + plan."""
_PIECES_PER_TAG = 1 << 12
_BITS_OF_BUCKET = 28  # of a tag: bucket, round and piece
_PLANS_PER_TAG = 8  # few are in use at a time; a tag is a positive number of 32 bits
_MAGIC = b"plh1"
_HEADER = struct.Struct("<4sHHIIIQdQ")


class Transfer(Protocol):
    """Its memory must stay as it is until `wait` has returned."""

    def wait(self, timeout: Any, /) -> object:
        """Block until the message has been sent, or has come."""
        ...


Begin: TypeAlias = Callable[[], Transfer]
"""Begins to send or to receive a message. Raises RuntimeError if the connection is over."""


class HostsTransport(Protocol):
    """A message has the same memory, tag and peer in every backward. So it is prepared once, and each call of
    what `sending` and `receiving` return begins it anew, once the one before has ended.

    Attributes:
        host: Number of this rank's host, in the order of the hosts' lowest ranks.
        ranks: The peer on each host, and this rank itself.
        needs_headers: Whether every message has to begin with a header, by which this tells them apart.
        lets_signals_in: Whether the handlers of signals run while the main thread waits for a transfer.
    """

    host: int
    ranks: Sequence[int]
    needs_headers: bool
    lets_signals_in: bool

    def sending(self, host: int, message: Message, tag: int) -> Begin:
        """What sends a message to the peer on a host. It must not change before the `wait` returns."""
        ...

    def receiving(self, host: int, message: Message, tag: int) -> Begin:
        """What receives, from the peer on a host, the message of this tag and size.

        Example:
            Host 0 calls sending(1, message, 7)(), host 1 receiving(0, buffer, 7)(); both wait; then the
            buffer of host 1 holds the message.
        """
        ...

    def timeout_of(self, timeout_s: float) -> Any:
        """What the transfers' `wait` takes for so many seconds: made once, because they are many."""
        ...

    def name(self, host: int) -> str:
        """The peer in words: "rank 2 (host 1, node7)"."""
        ...

    def abort(self) -> None:
        """Wake all waits; nothing can be sent any more. Not collective."""
        ...


@dataclass(frozen=True)
class Header:
    """What a message is.

    Attributes:
        generation: Number of the reducer, among all whose messages take the same connections.
        number: The backward.
        bucket: In the plan.
        round: 0, or 1 for sums that their owner sends.
        host: That sends.
        piece: Number among what it sends in this round: all pieces of its first block, then of the next.
        weight: The sum over the ranks of the block; in the second round, over all.
        nbytes: Behind the header.
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
        """None: it is no header."""
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
    """The header of a message that goes in every backward from the same memory, or comes there."""

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
        """None: it is not the message that is waited for."""
        found = _HEADER.unpack_from(self._view)
        is_expected = found[:6] == self._expected and found[6] == number and found[8] == self._nbytes
        return float(found[7]) if is_expected else None

    def has_begun_to_come(self, number: int) -> bool:
        """Whether the header of this backward is there; what follows may not be."""
        found = _HEADER.unpack_from(self._view)
        return bool(found[0] == _MAGIC and found[6] == number)

    def header(self, number: int, weight: float = 0.0) -> Header:
        _, phase, host, generation, bucket, piece = self._expected
        return Header(generation, number, bucket, phase, host, piece, weight, self._nbytes)


def tag_of(bucket: int, phase: int, piece: int, generation: int = 0) -> int:
    """The number that pairs a message with its receive, between two peers.

    It includes the plan: a receive that was begun under an earlier plan, for a backward that never came,
    takes no message of this one.
    """
    plan = generation % PLANS % _PLANS_PER_TAG
    return (plan << _BITS_OF_BUCKET) + (bucket * 2 + phase) * _PIECES_PER_TAG + piece


def lane_of(tag: int, lanes: int) -> int:
    """Over which of several connections a message goes: neighbouring ones over different ones.

    Those of one tag, in different backward passes, go over the same, and so stay in order.
    """
    return (tag // (2 * _PIECES_PER_TAG) + tag % _PIECES_PER_TAG) % lanes
