"""DistributedStream: iterable data in shards, each read by one worker of one rank.

If there are not enough shards for all workers, several workers read the same shard, and each keeps a part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from paceline.arguments import Arguments
from paceline.data.order import Shuffled, derive_key
from paceline.data.rank import find_rank, loader_worker
from paceline.data.sampler_arguments import seed_of

Shard = TypeVar("Shard")
Sample = TypeVar("Sample")


class DistributedStream(Generic[Shard, Sample]):
    """An iterable data set over shards: all ranks and loader workers together see every element once.

    Pass it to torch's `DataLoader`, with any number of workers; torch treats it as an `IterableDataset`. For
    Paddle's loader, inherit from both: `class Lines(DistributedStream, paddle.io.IterableDataset)`.

    Ranks get unequally many elements unless the shards are alike. A stream has no length, and cannot resume
    inside of an epoch.

    Args:
        shards: Names, paths, ... of the shards of the data, the same in the same order on all ranks.
        read: Returns the elements of a shard, always in the same order. Workers call it; for worker processes
            that are not forked it must be picklable.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        shuffle: Permute the shards, differently in every epoch. Elements keep their order inside a shard.
        seed: The seed of the permutation; any integer, the same on all ranks.

    Raises:
        ConfigError: The rank or the number of ranks is missing or out of range.

    Example:
        Shards ["a", "b", "c", "d"], two ranks with two workers each: every worker reads one of them. With
        shards ["a", "b"] two workers read each, and one yields its elements 0, 2, ..., the other 1, 3, ...
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[Shard], Iterable[Sample]],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.num_replicas, self.rank = find_rank(type(self).__name__, num_replicas, rank)
        check = Arguments(type(self).__name__)
        if not hasattr(shards, "__len__") or not hasattr(shards, "__getitem__"):
            hint = "list(...) of what can only be iterated over, sorted where it has no order"
            raise check.refuse("shards", shards, "a list: as long and in the same order on all ranks", hint)
        self.shards = shards
        self.read = check.function("read", read, "read(shard), which returns its elements")
        self.shuffle = check.flag("shuffle", shuffle)
        self.seed = seed_of(type(self).__name__, seed)
        self.epoch = 0
        _pass_for_iterable(type(self))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the shards, with the same number on every rank.

        A stream does not advance to the next epoch by itself, because the workers of a loader hold copies of
        it. Call this before iterating over the loader; persistent workers keep the epoch they started in.

        Raises:
            ConfigError: The epoch is negative.
        """
        self.epoch = Arguments(f"{type(self).__name__}.set_epoch").whole("epoch", epoch, least=0)

    def __iter__(self) -> Iterator[Sample]:
        """The elements of this worker of this rank; outside of a loader, those of this rank."""
        worker, num_workers = loader_worker()
        # Consecutive consumers belong to different ranks, so that shards are spread over ranks first.
        consumer = worker * self.num_replicas + self.rank
        for shard, part, parts in deal_shards(len(self.shards), consumer, self.num_replicas * num_workers):
            elements = self.read(self.shards[self._shard_at(shard)])
            yield from islice(elements, part, None, parts)

    def _shard_at(self, place: int) -> int:
        if not self.shuffle:
            return place
        key = derive_key(self.seed, self.epoch, "shards")
        return int(Shuffled(len(self.shards), key).at(place, 1, 1)[0])


def deal_shards(num_shards: int, consumer: int, num_consumers: int) -> Iterator[tuple[int, int, int]]:
    """What a consumer (a worker of a rank) reads: (place of the shard, its part, number of parts).

    Each consumer gets whole shards as long as there is one for each. Each shard that is left is divided among
    several consumers.
    """
    whole, rest = divmod(num_shards, num_consumers)
    for round_ in range(whole):
        yield round_ * num_consumers + consumer, 0, 1
    if rest:
        # Consumer c reads shard c % rest, so some shards have one reader more than others.
        place = consumer % rest
        readers = num_consumers // rest + (place < num_consumers % rest)
        yield whole * num_consumers + place, consumer // rest, readers


def _pass_for_iterable(cls: type[Any]) -> None:
    torch: Any = sys.modules.get("torch")
    data = getattr(getattr(torch, "utils", None), "data", None)
    if data is not None and not issubclass(cls, data.IterableDataset):
        data.IterableDataset.register(cls)
