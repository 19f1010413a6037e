"""The routes of shards between hosts: which host sends which elements of a bucket to which other.

The package docstring defines the words, and says what each route costs. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MESSAGE_BYTES = 512 << 10
"""Most bytes of one message, unless LONG_MESSAGE_BYTES applies. A connection of Gloo moves large messages one
after the other, and not both ways at once; smaller pieces let it use both directions."""
LONG_MESSAGE_BYTES = 2 << 20
"""Most bytes of one message of gradients, between two hosts or if more buckets follow. Nothing has to be
computed before it is sent, and each message costs a rank tens of microseconds, including Gloo's handshake
with the peer. Connections between more hosts share the network unevenly, and a large piece that comes late
keeps the other connections idle unless another bucket uses them."""
ONE_ROUND_BYTES = 12 << 10
"""How many more bytes than two rounds one round may send. At 100 Mbit/s they take 1 ms, about as long as a
second round."""
VALUES_BYTES = 256 << 10
"""Smaller shards travel as sums, because further messages would cost more than they save. Gradients of 16
bits always travel as values, because their sums are twice as large. Below this size they go in one round if
sums would, too."""
BUCKET_BYTES = 4 << 20
"""Largest bucket between hosts: while one is exchanged the next is computed, and the exchange of the last one
overlaps with nothing."""
_BLOCK_ELEMENTS = 16


@dataclass(frozen=True)
class Route:
    """The route of one rank's shard of a bucket. Elements count from the beginning of the bucket.

    Attributes:
        shard: The elements.
        parts: With one round: one part, the whole shard. With two: the part of each host. Each is in pieces.
        is_of_values: Whether gradients travel, and not their sums.
    """

    shard: range
    parts: tuple[tuple[range, ...], ...]
    is_of_values: bool = False

    @property
    def is_one_round(self) -> bool:
        return len(self.parts) == 1

    def part_of(self, host: int) -> tuple[range, ...]:
        return self.parts[0 if self.is_one_round else host]


def plan_route(
    count: int,
    itemsize: int,
    local_rank: int,
    num_ranks: int,
    num_hosts: int,
    piece_bytes: int | None = None,
    num_blocks: Sequence[int] | None = None,
    value_bytes: int | None = None,
    *,
    is_followed: bool = False,
) -> Route:
    """The route of one rank's shard; a pure function with the same result for all its peers.

    Example:
        >>> plan_route(64, 4, 1, 2, 2)
        Route(shard=range(32, 64), parts=((range(32, 64),),), is_of_values=False)
    """
    shard = _cut_evenly(range(count), num_ranks)[local_rank]
    if value_bytes is not None and (value_bytes < itemsize or len(shard) * value_bytes >= VALUES_BYTES):
        is_long = num_hosts == 2 or is_followed
        piece_bytes = piece_bytes or (LONG_MESSAGE_BYTES if is_long else MESSAGE_BYTES)
        most = piece_bytes // value_bytes // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS
        nbytes = len(shard) * value_bytes
        is_one_round = (
            nbytes < VALUES_BYTES and _more_in_one_round(nbytes, [1] * num_hosts) <= ONE_ROUND_BYTES
        )
        parts = [shard] if is_one_round else _cut_evenly(shard, num_hosts)
        return Route(shard, tuple(_pieces(part, most) for part in parts), is_of_values=True)
    piece_bytes = piece_bytes or MESSAGE_BYTES
    num_blocks = [1] * num_hosts if num_blocks is None else num_blocks
    nbytes = len(shard) * itemsize
    if _more_in_one_round(nbytes, num_blocks) <= ONE_ROUND_BYTES:
        parts = [shard]
    elif num_hosts == 2 and nbytes > 2 * piece_bytes:
        parts = _cut_by_blocks(shard, *num_blocks)
    else:
        parts = _cut_evenly(shard, num_hosts)
    most = max(_BLOCK_ELEMENTS, piece_bytes // itemsize // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS)
    return Route(shard, tuple(_pieces(part, most) for part in parts))


def _more_in_one_round(nbytes: int, num_blocks: Sequence[int]) -> float:
    """How many more bytes than in two rounds the host with the most blocks sends in one."""
    hosts, blocks = len(num_blocks), max(num_blocks)
    return (blocks * hosts - blocks - 1) * (hosts - 1) * nbytes / hosts


def place_of(hosts: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    return host, list(hosts[host]).index(rank)


def num_shards(ranks: Sequence[Sequence[int]]) -> int:
    """How many ranks of each host have a shard."""
    return min(map(len, ranks))


def spoken_for(ranks: Sequence[int], local_rank: int, shards: int) -> tuple[int, ...]:
    """The ranks of a host whose reports one of them sends: itself, and some of those without a shard.

    Example:
        >>> spoken_for([4, 5, 6], local_rank=0, shards=2)
        (4, 6)
    """
    return tuple(ranks[local_rank::shards])


def turns_of(host: int, num_hosts: int) -> list[int]:
    """The other hosts, in the order in which this host sends to them.

    In each turn every host receives from one other, so that no host has two senders while another has none.
    """
    return [(host + turn) % num_hosts for turn in range(1, num_hosts)]


def _cut_evenly(whole: range, count: int) -> list[range]:
    """Consecutive ranges whose sizes differ by at most one block; only the last may end within a block."""
    blocks = -(-len(whole) // _BLOCK_ELEMENTS)
    cuts = [min(len(whole), blocks * i // count * _BLOCK_ELEMENTS) for i in range(count + 1)]
    return [whole[begin:end] for begin, end in pairwise(cuts)]


def _cut_by_blocks(shard: range, one: int, other: int) -> list[range]:
    """The parts of two hosts with these numbers of blocks, chosen so that both send equally much.

    A host that owns x of the shard sends its blocks' sums of the rest, and x. For example with 1 and 2
    blocks, the second host owns everything, receives the first one's sum and sends the result, and neither
    sends more than the shard.
    """
    blocks = -(-len(shard) // _BLOCK_ELEMENTS)
    cut = min(len(shard), blocks * (one - 1) // (one + other - 2) * _BLOCK_ELEMENTS)
    return [shard[:cut], shard[cut:]]


def _pieces(part: range, most: int) -> tuple[range, ...]:
    """Ranges of at most `most` elements; at least one, because its message carries more than elements."""
    return tuple(part[begin : begin + most] for begin in range(0, max(1, len(part)), most))
