"""Between hosts: who sends which part of a bucket to whom, what each message says, and what carries it.

Words
  share    the part of each bucket that one rank of a host sums and exchanges with its *partners*, the ranks
           with the same local rank on the other hosts. There are as many as the smallest host has ranks;
           further ranks of a larger host have none
  block    neighbouring ranks of one host whose sum goes to the other hosts. Each host is one, unless the
           sums have to be those of one host and this layout would add up in another order
  part     of a share, what one host sums for all, where there are two rounds
  piece    of a share or a part, what one message holds
  round    one step of an exchange; every host sends to every other in each

Routes of a share of S bytes between H hosts of B blocks each
  one round   for two hosts of one block, and where it sends little more: everybody's share to everybody.
              B * (H - 1) * S sent, one latency.
  two rounds  otherwise: each part to its owner, who adds the sums up, then the sum to everybody.
              (B + 1) * (H - 1) / H * S sent, for one block the least that there is, and two latencies.
              Two hosts with B and C blocks have parts with which both send the same: (B * C - 1) /
              (B + C - 2) * S.
Both add up in the same order, so both give the same bits.

What travels is sums, each behind a header in a message of its own (`sum_messages`). Between hosts of one rank
each it is that rank's gradients as they are, from the memory in which they lie, where there are many of them
(`value_messages`): in two rounds, with few headers.

Whoever gets a header that is not what it waits for raises; a wrong pairing is never a wrong mean. Messages
pair by tags, so buckets need no order.

Imports numpy and the standard library.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

_Item = TypeVar("_Item")
Message = np.ndarray[Any, np.dtype[np.uint8]]
"""The bytes of one message: header, payload, and a report behind it or none."""

HEADER_BYTES = 64
"""A cache line, so that the payload behind it is aligned."""
MESSAGE_BYTES = 512 << 10
"""Most of one message, but for the next case. One connection of Gloo moves one large message after the
other, not both ways at once; pieces let it use both directions of a link."""
PAIR_MESSAGE_BYTES = 2 << 20
"""Most of one message of gradients that travel as they are between two hosts. Nothing has to be made before
they are sent, and each message takes a rank tens of microseconds, with what Gloo says to the partner's. With
more hosts connections share links unevenly, and a large piece that comes late keeps the other links idle."""
ONE_ROUND_BYTES = 12 << 10
"""How many more bytes than two rounds one round may send. At 100 Mbit/s they take 1 ms, about as long as a
second round."""
VALUES_BYTES = 256 << 10
"""Smaller shares travel as sums: further messages would cost more than they save. Gradients of 16 bits always
travel as they are, because their sums are twice as large; below this size in one round, where sums would."""
BUCKET_BYTES = 4 << 20
"""Most of a bucket between hosts: while one is exchanged the next is computed, and the last has nothing
behind which it could hide."""
PLANS = 1 << 16
"""Models that share connections tell their messages apart: generation = model * PLANS + plan."""
_BLOCK_ELEMENTS = 16
_PIECES_PER_TAG = 1 << 12
_BITS_OF_BUCKET = 28  # of a tag: bucket, round and piece
_PLANS_PER_TAG = 8  # few are in use at a time; a tag is a positive number of 32 bits
_MAGIC = b"plh1"
_HEADER = struct.Struct("<4sHHIIIQdQ")


class Transfer(Protocol):
    """A message on its way. Its memory must stay as it is until `wait` has returned."""

    def wait(self, timeout: Any, /) -> object:
        """Block until the message has been sent, or has come.

        Args:
            timeout: For how long at most: what `HostsTransport.timeout_of` has made.

        Raises:
            RuntimeError: It was not in time, or the connection broke. The transport is over.
        """
        ...


Begin: TypeAlias = Callable[[], Transfer]
"""Begins to send or to receive a message. Raises RuntimeError if the connection is over."""


class HostsTransport(Protocol):
    """One rank's connections to its partners.

    A message has the same memory, tag and partner in every pass. So it is prepared once, and each call of
    what `sending` and `receiving` return begins it anew, once the one before has ended.

    Attributes:
        host: Number of this rank's host, in the order of the hosts' lowest ranks.
        ranks: The partner on each host, and this rank itself.
        needs_headers: Whether every message has to begin with a header, by which this tells them apart.
    """

    host: int
    ranks: Sequence[int]
    needs_headers: bool

    def sending(self, host: int, message: Message, tag: int) -> Begin:
        """What sends a message to the partner on a host. It must not change before the `wait` returns."""
        ...

    def receiving(self, host: int, message: Message, tag: int) -> Begin:
        """What receives, from the partner on a host, the message of this tag and size.

        Example:
            Host 0 calls sending(1, message, 7)(), host 1 receiving(0, buffer, 7)(); both wait; then the
            buffer of host 1 holds the message.
        """
        ...

    def timeout_of(self, timeout_s: float) -> Any:
        """What the transfers' `wait` takes for so many seconds: made once, because they are many."""
        ...

    def name(self, host: int) -> str:
        """The partner in words: "rank 2 (host 1, node7)"."""
        ...

    def abort(self) -> None:
        """Wake whoever waits; nothing can be sent any more. Not collective."""
        ...


@dataclass(frozen=True)
class Header:
    """What a message is.

    Attributes:
        generation: Number of the reducer, among all whose messages take the same connections.
        number: The pass.
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
            f"pass {self.number}, bucket {self.bucket}, round {self.round}, piece {self.piece} of host "
            f"{self.host} ({self.nbytes} bytes), plan {self.generation}"
        )


class Envelope:
    """The header of a message that goes in every pass from the same memory, or comes there.

    Args:
        message: Its memory.
        generation, bucket, phase, host, piece: The fields of its `Header`; `phase` is the round.
    """

    __slots__ = ("_expected", "_nbytes", "_view")

    def __init__(
        self, message: Message, generation: int, bucket: int, phase: int, host: int, piece: int
    ) -> None:
        self._view = message.data
        self._expected = (_MAGIC, phase, host, generation, bucket, piece)
        self._nbytes = len(message) - HEADER_BYTES
        message[: len(_MAGIC)] = 0

    def write(self, number: int, weight: float) -> None:
        """Put the header of a pass in front."""
        _HEADER.pack_into(self._view, 0, *self._expected, number, weight, self._nbytes)

    def weight_in(self, number: int) -> float | None:
        """The weight of a message that has come in a pass; None: it is another one than is waited for."""
        found = _HEADER.unpack_from(self._view)
        is_expected = found[:6] == self._expected and found[6] == number and found[8] == self._nbytes
        return float(found[7]) if is_expected else None

    def has_begun_to_come(self, number: int) -> bool:
        """Whether the header of this pass is there; what follows may not be."""
        found = _HEADER.unpack_from(self._view)
        return bool(found[0] == _MAGIC and found[6] == number)

    def header(self, number: int, weight: float = 0.0) -> Header:
        """What `write` puts in front."""
        _, phase, host, generation, bucket, piece = self._expected
        return Header(generation, number, bucket, phase, host, piece, weight, self._nbytes)


def tag_of(bucket: int, phase: int, piece: int, generation: int = 0) -> int:
    """The number that pairs a message with its receive, between two partners.

    It includes the plan: a receive that was begun under an earlier plan, for a pass that never came, takes no
    message of this one.
    """
    plan = generation % PLANS % _PLANS_PER_TAG
    return (plan << _BITS_OF_BUCKET) + (bucket * 2 + phase) * _PIECES_PER_TAG + piece


def lane_of(tag: int, lanes: int) -> int:
    """Over which of several connections a message goes: neighbouring ones over different ones.

    Those of one tag, in different passes, go over the same, and so stay in order.

    Example:
        >>> [lane_of(tag_of(0, 0, piece), 2) for piece in range(3)], lane_of(tag_of(1, 0, 0), 2)
        ([0, 1, 0], 1)
    """
    return (tag // (2 * _PIECES_PER_TAG) + tag % _PIECES_PER_TAG) % lanes


@dataclass(frozen=True)
class Route:
    """How one rank's share of a bucket travels. Elements count from the beginning of the bucket.

    Attributes:
        share: The elements.
        parts: In one round: one, the whole share. Else that of each host. Each in pieces.
        is_of_values: Whether gradients travel as they are, and not their sums.
    """

    share: range
    parts: tuple[tuple[range, ...], ...]
    is_of_values: bool = False

    @property
    def is_one_round(self) -> bool:
        return len(self.parts) == 1

    def part_of(self, host: int) -> tuple[range, ...]:
        """Pieces whose sums of all hosts a host adds up."""
        return self.parts[0 if self.is_one_round else host]


@dataclass(frozen=True)
class Block:
    """Neighbouring ranks of a host, whose sum goes to the other hosts.

    Attributes:
        host: The number of the host.
        local_ranks: The first of the ranks and the one behind the last, by their local ranks.
    """

    host: int
    local_ranks: tuple[int, int]


@dataclass(frozen=True)
class Blocks:
    """Whose sums travel, and how they are added.

    Attributes:
        blocks: In the order of their lowest ranks.
        steps: Pairs to be added one after the other, by their numbers: block i has number i, the result of
            step j the number len(blocks) + j. Empty: all at once, as `add_in_order` does.
    """

    blocks: tuple[Block, ...]
    steps: tuple[tuple[int, int], ...] = ()

    def add(self, numbers: Sequence[float]) -> float:
        """The sum of one number for each block, in the order of sums."""
        if not self.steps:
            return add_in_order(numbers)
        found = list(numbers)
        for left, right in self.steps:
            found.append(found[left] + found[right])
        return found[-1]


def whole_hosts(ranks: Sequence[Sequence[int]], most_at_once: int) -> Blocks:
    """Each host as one block: the fewest bytes.

    Args:
        ranks: The ranks of each host, in order; hosts in the order of their lowest ranks.
        most_at_once: How many sums can be added without steps.

    Example:
        >>> whole_hosts([[0], [1], [2]], 128).steps, whole_hosts([[0], [1], [2]], 2).steps
        ((), ((0, 1), (3, 2)))
    """
    leaves: list[_Tree] = [Block(host, (0, len(each))) for host, each in enumerate(ranks)]
    return _in_steps(join_in_order(leaves, _Pair), most_at_once)


def exact_blocks(ranks: Sequence[Sequence[int]], most_at_once: int) -> Blocks:
    """The largest nodes of the tree over all ranks that lie on one host each, and the rest of this tree.

    So their sum is that of one host with all the ranks, to the last bit.

    Args:
        ranks: See `whole_hosts`.
        most_at_once: How many sums can be added without steps.

    Example:
        >>> exact_blocks([[0, 1], [2, 3]], 128) == whole_hosts([[0, 1], [2, 3]], 128)
        True
        >>> found = exact_blocks([[0, 1, 2], [3, 4, 5]], 128)  # ((0 + 1) + (2 + 3)) + (4 + 5)
        >>> [(block.host, block.local_ranks) for block in found.blocks], found.steps
        ([(0, (0, 2)), (0, (2, 3)), (1, (0, 1)), (1, (1, 3))], ((1, 2), (0, 4), (5, 3)))
    """
    leaves = {
        rank: Block(host, (local_rank, local_rank + 1))
        for host, each in enumerate(ranks)
        for local_rank, rank in enumerate(each)
    }
    every: list[_Tree] = [leaves[rank] for rank in sorted(leaves)]
    return _in_steps(join_in_order(every, _join_on_one_host), most_at_once)


def _in_steps(tree: _Tree, most_at_once: int) -> Blocks:
    """How a tree is added up: without steps, if it is the one in which all its leaves are added at once."""
    blocks: list[Block] = []
    pairs: list[_Pair] = []
    _flatten(tree, blocks, pairs)
    nodes: list[_Tree] = [*blocks, *pairs]
    if tree == join_in_order(nodes[: len(blocks)], _Pair) and len(blocks) <= most_at_once:
        return Blocks(tuple(blocks))
    numbers = {node: number for number, node in enumerate(nodes)}
    return Blocks(tuple(blocks), tuple((numbers[pair.left], numbers[pair.right]) for pair in pairs))


@dataclass(frozen=True)
class _Pair:
    """A sum of what lies on several hosts."""

    left: _Tree
    right: _Tree


_Tree: TypeAlias = "Block | _Pair"


def _join_on_one_host(left: _Tree, right: _Tree) -> _Tree:
    if isinstance(left, Block) and isinstance(right, Block) and left.host == right.host:
        return Block(left.host, (left.local_ranks[0], right.local_ranks[1]))
    return _Pair(left, right)


def _flatten(tree: _Tree, blocks: list[Block], pairs: list[_Pair]) -> None:
    """Append the leaves of a tree, and its inner nodes in an order in which they can be added."""
    if isinstance(tree, Block):
        blocks.append(tree)
        return
    _flatten(tree.left, blocks, pairs)
    _flatten(tree.right, blocks, pairs)
    pairs.append(tree)


def plan_route(
    count: int,
    itemsize: int,
    local_rank: int,
    num_ranks: int,
    num_hosts: int,
    piece_bytes: int | None = None,
    num_blocks: Sequence[int] | None = None,
    value_bytes: int | None = None,
) -> Route:
    """The route of one rank's share; a pure function, the same for all its partners.

    Args:
        count: Elements of the bucket.
        itemsize: Bytes of an element of a sum.
        local_rank: Number of the rank in its host.
        num_ranks: How many have a share, on each host.
        num_hosts: At least 2.
        piece_bytes: Most of one message; None: what suits it.
        num_blocks: How many blocks each host has; None: one.
        value_bytes: Bytes of an element of a gradient, where gradients may travel as they are; None: they
            may not.

    Example:
        >>> plan_route(64, 4, 1, 2, 2)
        Route(share=range(32, 64), parts=((range(32, 64),),), is_of_values=False)
    """
    share = _cut_evenly(range(count), num_ranks)[local_rank]
    if value_bytes is not None and (value_bytes < itemsize or len(share) * value_bytes >= VALUES_BYTES):
        piece_bytes = piece_bytes or (PAIR_MESSAGE_BYTES if num_hosts == 2 else MESSAGE_BYTES)
        most = piece_bytes // value_bytes // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS
        nbytes = len(share) * value_bytes
        is_one_round = (
            nbytes < VALUES_BYTES and _more_in_one_round(nbytes, [1] * num_hosts) <= ONE_ROUND_BYTES
        )
        parts = [share] if is_one_round else _cut_evenly(share, num_hosts)
        return Route(share, tuple(_pieces(part, most) for part in parts), is_of_values=True)
    piece_bytes = piece_bytes or MESSAGE_BYTES
    num_blocks = [1] * num_hosts if num_blocks is None else num_blocks
    nbytes = len(share) * itemsize
    if _more_in_one_round(nbytes, num_blocks) <= ONE_ROUND_BYTES:
        parts = [share]
    elif num_hosts == 2 and nbytes > 2 * piece_bytes:
        parts = _cut_by_blocks(share, *num_blocks)
    else:
        parts = _cut_evenly(share, num_hosts)
    most = max(_BLOCK_ELEMENTS, piece_bytes // itemsize // _BLOCK_ELEMENTS * _BLOCK_ELEMENTS)
    return Route(share, tuple(_pieces(part, most) for part in parts))


def _more_in_one_round(nbytes: int, num_blocks: Sequence[int]) -> float:
    """How many bytes more than in two rounds the host with the most blocks sends in one.

    Example:
        >>> [_more_in_one_round(96, num_blocks) for num_blocks in ([1, 1], [1, 1, 1], [1, 2])]
        [0.0, 64.0, 48.0]
    """
    hosts, blocks = len(num_blocks), max(num_blocks)
    return (blocks * hosts - blocks - 1) * (hosts - 1) * nbytes / hosts


def place_of(hosts: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """The number of a rank's host, and its local rank there.

    Example:
        >>> place_of([[0, 1], [2, 3]], 3)
        (1, 1)
    """
    host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    return host, list(hosts[host]).index(rank)


def num_shares(ranks: Sequence[Sequence[int]]) -> int:
    """How many ranks of each host have a share, where these are the ranks of the hosts.

    Example:
        >>> num_shares([[0, 1], [2]])
        1
    """
    return min(map(len, ranks))


def spoken_for(ranks: Sequence[int], local_rank: int, shares: int) -> tuple[int, ...]:
    """The ranks of a host whose reports travel beside the share of one of them: itself, and some without one.

    Args:
        ranks: The ranks of the host.
        local_rank: Below `shares`.
        shares: See `num_shares`.

    Example:
        >>> spoken_for([4, 5, 6], local_rank=0, shares=2)
        (4, 6)
    """
    return tuple(ranks[local_rank::shares])


def turns_of(host: int, num_hosts: int) -> list[int]:
    """The other hosts, in the order in which one sends to them.

    In each turn every host is sent to by one other, so that no link has two messages for it while another
    one has none.

    Example:
        >>> [turns_of(host, 3) for host in range(3)]
        [[1, 2], [2, 0], [0, 1]]
    """
    return [(host + turn) % num_hosts for turn in range(1, num_hosts)]


def has_bits_of_one_host(ranks: Sequence[Sequence[int]]) -> bool:
    """Whether sums in each host, and then over the hosts, are the sums of one host with all the ranks.

    Args:
        ranks: The ranks of each host, in order; hosts in the order of their lowest ranks.

    Example:
        >>> has_bits_of_one_host([[0, 1], [2, 3]]), has_bits_of_one_host([[0, 2], [1, 3]])
        (True, False)
        >>> has_bits_of_one_host([[0, 1], [2]]), has_bits_of_one_host([[0], [1, 2]])
        (True, False)
    """

    def tree(leaves: Sequence[object]) -> object:
        return join_in_order(leaves, lambda left, right: (left, right))

    return tree([tree(host) for host in ranks]) == tree(range(sum(map(len, ranks))))


def add_in_order(numbers: Sequence[float]) -> float:
    """The sum, in the order in which the core sums over ranks: neighbours first, an odd one carried up.

    Example:
        >>> add_in_order([1.0, 2.0, 4.0])
        7.0
    """
    return join_in_order(numbers, operator.add)


def join_in_order(items: Sequence[_Item], join: Callable[[_Item, _Item], _Item]) -> _Item:
    """What `add_in_order` does, with anything that can be joined in pairs; at least one item."""
    level = list(items)
    while len(level) > 1:
        pairs = [join(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def _cut_evenly(whole: range, count: int) -> list[range]:
    """Neighbouring ranges whose sizes differ by one block at most; only the last may end within a block."""
    blocks = -(-len(whole) // _BLOCK_ELEMENTS)
    cuts = [min(len(whole), blocks * i // count * _BLOCK_ELEMENTS) for i in range(count + 1)]
    return [whole[begin:end] for begin, end in pairwise(cuts)]


def _cut_by_blocks(share: range, one: int, other: int) -> list[range]:
    """The parts of two hosts that have so many blocks, with which both send the same.

    Whoever owns x of the share sends its blocks of the rest, and x: with 1 and 2 blocks, the second host owns
    everything, gets the first one's sum and sends the result, and neither sends more than the share. Its
    result waits for all that it is made of, piece by piece; so this is for shares of several pieces.
    """
    blocks = -(-len(share) // _BLOCK_ELEMENTS)
    cut = min(len(share), blocks * (one - 1) // (one + other - 2) * _BLOCK_ELEMENTS)
    return [share[:cut], share[cut:]]


def _pieces(part: range, most: int) -> tuple[range, ...]:
    """At least one, because a message says more than it carries."""
    return tuple(part[begin : begin + most] for begin in range(0, max(1, len(part)), most))
