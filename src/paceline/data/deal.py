"""Deals the places of an epoch to the ranks. Pure arithmetic.

A place is a position in the epoch's order of samples. Each step takes the next places, so the samples that
all ranks have trained on after any number of steps are a prefix of the order. One number describes it, and
the rest can be dealt to another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import numpy as np

from paceline.data.order import Indices, Order

# numpy's numbers become Python's in blocks, which are large enough to make the cost of a block negligible,
# and small enough for the cache. The first block is small, so that an epoch starts at once; each is as large
# as all before it, up to BLOCK.
BLOCK = 4096
FIRST_BLOCK = 64

Item = TypeVar("Item")


class Ending(Enum):
    """What happens to the last samples of an epoch, which do not divide evenly."""

    PAD = "pad"  # repeat samples from the start of the order, so that every rank has equally many
    FILL = "fill"  # repeat samples until the last step has as many as the others, for any number of ranks
    DROP = "drop"  # leave the last samples out
    UNEVEN = "uneven"  # some ranks get one sample less than others


@dataclass(frozen=True)
class Share:
    """The places from `start` to `length`, dealt in turn to `num_replicas` ranks, as `rank` gets them."""

    length: int
    start: int
    num_replicas: int
    rank: int
    ending: Ending

    @property
    def left(self) -> int:
        return max(0, self.length - self.start)

    def part_of(self, places: int) -> int:
        if self.ending is Ending.DROP:
            return places // self.num_replicas
        if self.ending is Ending.PAD:
            return -(-places // self.num_replicas)
        return max(0, -(-(places - self.rank) // self.num_replicas))

    def take(self, order: Order, start: int, count: int) -> Indices:
        """`count` samples at places start + rank, start + rank + num_replicas, ..., which wrap at the end."""
        place, stride = start + self.rank, self.num_replicas
        parts = []
        while count > 0:
            place %= self.length
            inside = min(count, -(-(self.length - place) // stride))
            parts.append(order.at(place, stride, inside))
            place, count = place + inside * stride, count - inside
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else order.at(0, 1, 0)


def blocks_of(total: int, first: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut the range up to `total` into blocks (start, size), whose sizes grow from `first` to `most`."""
    done = 0
    while done < total:
        size = min(most, max(first, done), total - done)
        yield done, size
        done += size


class Deal(Protocol[Item]):
    @property
    def size(self) -> int: ...

    @property
    def end(self) -> int:
        """The place at which the epoch is over for all ranks."""

    def reached(self, items: int) -> int:
        """The place below which all is done once every rank has done `items` items, or all of its items."""

    def blocks(self, order: Order) -> Iterator[list[Item]]: ...


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
        return min(self.end, self._share.start + items * self._share.num_replicas)

    def blocks(self, order: Order) -> Iterator[list[int]]:
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
        return min(self.end, self._share.start + items * self._global_batch)

    def blocks(self, order: Order) -> Iterator[list[list[int]]]:
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


class InTurnDeal:
    """The batches of several ranks that one process plays: in each step one batch of each, in rank order.

    Example:
        Eight places, four ranks, global_batch=4: a process that plays ranks 2 and 3 gets [2], [3], [6], [7].
    """

    def __init__(self, deals: Sequence[BatchDeal]) -> None:
        self._deals = deals
        self.size = sum(deal.size for deal in deals)
        self.end = deals[0].end

    def reached(self, items: int) -> int:
        return self._deals[0].reached(items // len(self._deals))

    def blocks(self, order: Order) -> Iterator[list[list[int]]]:
        for blocks in zip(*(deal.blocks(order) for deal in self._deals)):
            yield [batch for step in zip(*blocks) for batch in step]
