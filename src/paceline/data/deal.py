"""Who gets which places of an epoch: pure arithmetic.

The one idea: at each step the ranks together take the next places of one order. So what all of them have
trained on after any number of steps is a prefix of the order, one number, and the rest can be dealt to
another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import numpy as np

from paceline.data.order import Indices, Order

# Numbers become Python's in blocks: large enough to forget the cost of a block, small enough for the cache.
# The first one is small, so that an epoch starts at once; each is as large as all before it.
BLOCK = 4096
FIRST_BLOCK = 64

Item = TypeVar("Item")


class Ending(Enum):
    """What becomes of the last places, where they do not give every rank equally many."""

    PAD = "pad"  # repeat samples from the start of the order, so that every rank has as many
    FILL = "fill"  # repeat them until the last step has as many as the others, whatever the number of ranks
    DROP = "drop"  # leave them out
    UNEVEN = "uneven"  # some ranks get one less than others


@dataclass(frozen=True)
class Share:
    """Which part of an epoch a rank gets.

    Attributes:
        length: Places of the whole epoch.
        start: The first place that nobody has done yet.
        num_replicas: Number of ranks.
        rank: Which of them.
        ending: What becomes of the last places.
    """

    length: int
    start: int
    num_replicas: int
    rank: int
    ending: Ending

    @property
    def left(self) -> int:
        """Places that are still to be done, by all ranks together."""
        return max(0, self.length - self.start)

    def part_of(self, places: int) -> int:
        """How many of the next `places` this rank gets: every num_replicas-th, from its own rank on."""
        if self.ending is Ending.DROP:
            return places // self.num_replicas
        if self.ending is Ending.PAD:
            return -(-places // self.num_replicas)
        return max(0, -(-(places - self.rank) // self.num_replicas))

    def take(self, order: Order, start: int, count: int) -> Indices:
        """The samples at places start + rank, ...: `count` of them; beyond the end, from the beginning."""
        place, stride = start + self.rank, self.num_replicas
        parts = []
        while count > 0:
            place %= self.length
            inside = min(count, -(-(self.length - place) // stride))
            parts.append(order.at(place, stride, inside))
            place, count = place + inside * stride, count - inside
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else order.at(0, 1, 0)


def blocks_of(total: int, first: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut 0 ... total into blocks, as (start, size), which grow from `first` to `most`.

    Example:
        (100, 8, 32) gives (0, 8), (8, 8), (16, 16), (32, 32), (64, 32), (96, 4).
    """
    done = 0
    while done < total:
        size = min(most, max(first, done), total - done)
        yield done, size
        done += size


class Deal(Protocol[Item]):
    """One rank's items, samples or batches, from a start to the end of an epoch."""

    @property
    def size(self) -> int:
        """How many items this rank gets."""

    @property
    def end(self) -> int:
        """The place at which the epoch is over for all ranks."""

    def reached(self, items: int) -> int:
        """All places below this are done once every rank has done so many items, or all that it has."""

    def blocks(self, order: Order) -> Iterator[list[Item]]:
        """The items themselves, some at a time."""


class SampleDeal:
    """A rank's samples, one by one.

    Example:
        Five places, two ranks: with PAD rank 0 gets places 0, 2, 4 and rank 1 gets 1, 3, 0; with DROP
        0, 2 and 1, 3; with UNEVEN 0, 2, 4 and 1, 3.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self.size = share.part_of(share.left)
        is_cut = share.ending is Ending.DROP
        self.end = share.start + self.size * share.num_replicas if is_cut else share.length

    def reached(self, items: int) -> int:
        """See Deal."""
        return min(self.end, self._share.start + items * self._share.num_replicas)

    def blocks(self, order: Order) -> Iterator[list[int]]:
        """See Deal."""
        share = self._share
        for done, count in blocks_of(self.size, FIRST_BLOCK, BLOCK):
            indices: list[int] = share.take(order, share.start + done * share.num_replicas, count).tolist()
            yield indices


class BatchDeal:
    """A rank's batches. Each step takes the next `global_batch` places and deals them out.

    Example:
        Five places, two ranks, global_batch=4: rank 0 gets places [0, 2] and rank 1 gets [1, 3], and then
        with PAD [4] and [0], with FILL [4, 1] and [0, 2], with UNEVEN [4] and nothing, with DROP neither.
    """

    def __init__(self, share: Share, global_batch: int) -> None:
        self._share = share
        self._global_batch = global_batch
        whole, rest = divmod(share.left, global_batch)
        is_cut = share.ending is Ending.DROP
        self.end = share.start + whole * global_batch if is_cut else share.length
        if share.ending is Ending.FILL:
            whole, rest = whole + (rest > 0), 0
        self._whole = whole
        self._last = 0 if is_cut else share.part_of(rest)
        self.size = whole + (self._last > 0)

    def reached(self, items: int) -> int:
        """See Deal."""
        return min(self.end, self._share.start + items * self._global_batch)

    def blocks(self, order: Order) -> Iterator[list[list[int]]]:
        """See Deal."""
        share = self._share
        # A whole batch is dealt without an ending: where the ranks do not divide it, some get one less.
        plain = Share(share.length, share.start, share.num_replicas, share.rank, Ending.UNEVEN)
        count = plain.part_of(self._global_batch)
        if self._global_batch % share.num_replicas:
            for batch in range(self._whole):
                yield [plain.take(order, share.start + batch * self._global_batch, count).tolist()]
        else:
            first, most = max(1, FIRST_BLOCK // count), max(1, BLOCK // count)
            for batch, batches in blocks_of(self._whole, first, most):
                indices = plain.take(order, share.start + batch * self._global_batch, batches * count)
                yield indices.reshape(batches, count).tolist()
        if self._last:
            yield [share.take(order, share.start + self._whole * self._global_batch, self._last).tolist()]
