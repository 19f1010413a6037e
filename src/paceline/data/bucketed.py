"""BucketedSampler: batches of samples of similar length, with about as many tokens on every rank.

The samples of a global batch depend only on the seed and the lengths, and not on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from paceline.arguments import Arguments
from paceline.data.batch_sampler import choose_global_batch
from paceline.data.deal import Deal, Ending, Share
from paceline.data.distributed_sampler import choose_ending
from paceline.data.order import Indices, InOrder, Order, Shuffled, derive_key
from paceline.data.rank import find_rank
from paceline.data.resumable_epochs import EpochSampler
from paceline.data.sampler_arguments import seed_of
from paceline.data.subset import checked_indices


class BucketedSampler(EpochSampler[list[int]]):
    """Iterates over this rank's batches of samples of similar length; pass it as `batch_sampler=`.

    It is meant for data of different lengths, such as text. A batch needs little padding, and in each step
    all ranks have about as many tokens, so that no rank waits for another. The epoch's permutation is cut
    into pools of `pool_batches` global batches. A pool is sorted by length and cut into global batches, which
    come in random order. The samples of each are dealt to the ranks, the longest first, each to the rank that
    has the fewest tokens so far.

    `commit()`, once after each optimizer step, and `state_dict()` work as in `DistributedBatchSampler`. On
    every rank, each sample takes 8 bytes of memory, and each sample of a pool 100 bytes.

    Args:
        lengths: The length of each sample, in tokens or another measure of its cost: integers, 0 or more.
        global_batch_size: Samples of one step on all ranks together.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        shuffle: Permute samples and batches, differently in every epoch. False: pools in order, short
            samples first in each.
        seed: Any integer, the same on all ranks.
        drop_last: Leave out the epoch's last step if it has fewer samples.
        pad: Repeat the samples of a last step that has fewer, until there are `global_batch_size`. False:
            every sample exactly once; in the last step some ranks get one sample less, or no batch at all.
        pool_batches: Global batches that are sorted together. A larger pool gives less padding and less
            random batches.
        reshuffle: Begin the next epoch with each iteration. False: only `set_epoch` changes the epoch.

    Raises:
        ConfigError: An argument is out of range or contradicts another.

    Example:
        Lengths [1, 9, 2, 8], global_batch_size=2, two ranks: one step has samples 0 and 2, one on each
        rank, and the other 1 and 3.
    """

    def __init__(
        self,
        lengths: Sequence[int] | npt.NDArray[np.integer],
        global_batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        pool_batches: int = 64,
        reshuffle: bool = True,
    ) -> None:
        num_replicas, rank = find_rank(self.name, num_replicas, rank)
        self.global_batch_size = choose_global_batch(self.name, None, global_batch_size, num_replicas)
        check = Arguments(self.name)
        self._pool_batches = check.whole("pool_batches", pool_batches, least=1)
        self._ending = choose_ending(self.name, drop_last, pad, is_global=True)
        self._lengths = checked_indices(self.name, lengths, "lengths")
        self.shuffle = check.flag("shuffle", shuffle)
        self.seed = seed_of(self.name, seed)
        identity = {
            "dataset": hashlib.blake2b(self._lengths.tobytes(), digest_size=8).hexdigest(),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "global_batch_size": self.global_batch_size,
            "pool_batches": self._pool_batches,
        }
        super().__init__(len(self._lengths), num_replicas, rank, reshuffle=reshuffle, identity=identity)

    def commit(self, count: int = 1) -> None:
        """Record that an optimizer step has used `count` more of this rank's batches.

        See DistributedSampler.
        """
        super().commit(count)

    def _deal(self, start: int) -> Deal[list[int]]:
        share = Share(self._length, start, self.num_replicas, self.rank, self._ending)
        return _BucketDeal(share, self.global_batch_size, self._lengths)

    def _order(self, epoch: int) -> Order:
        keys = [
            derive_key(self.seed, epoch, part) if self.shuffle else None for part in ("bucketed", "pools")
        ]
        return Bucketed(self._lengths, self.global_batch_size, self._pool_batches, *keys)


class Bucketed:
    """The order of BucketedSampler: one global batch after the other, computed a pool at a time."""

    def __init__(
        self, lengths: Indices, batch: int, pool_batches: int, key: int | None, pool_key: int | None
    ) -> None:
        self.length = len(lengths)
        self._lengths = lengths
        self._batch = batch
        self._pool = batch * pool_batches
        self._pool_key = pool_key
        self._base: Order = InOrder(self.length) if key is None else Shuffled(self.length, key)
        self._newest: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def at(self, start: int, stride: int, count: int) -> Indices:
        parts = []
        while count > 0:
            pool, offset = divmod(start, self._pool)
            indices = self._sorted_pool(pool)[offset::stride][:count]
            parts.append(indices)
            start += len(indices) * stride
            count -= len(indices)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _sorted_pool(self, pool: int) -> Indices:
        if self._newest[0] != pool:
            first = pool * self._pool
            samples = self._base.at(first, 1, min(self._pool, self.length - first))
            samples = samples[np.argsort(self._lengths[samples], kind="stable")]
            whole = len(samples) // self._batch
            if self._pool_key is not None:
                batches = samples[: whole * self._batch].reshape(whole, self._batch)
                order = Shuffled(whole, derive_key(self._pool_key, pool)).at(0, 1, whole)
                samples = np.concatenate([batches[order].reshape(-1), samples[whole * self._batch :]])
            self._newest = (pool, samples)
        return self._newest[1]


class _BucketDeal:
    """A rank's batches: its samples of each global batch, balanced over ranks in number and in tokens."""

    def __init__(self, share: Share, batch: int, lengths: Indices) -> None:
        self._share = share
        self._batch = batch
        self._lengths = lengths
        whole, rest = divmod(share.left, batch)
        if share.ending is Ending.UNEVEN:
            self.size = whole + (share.part_of(rest) > 0)
        else:
            self.size = whole + (rest > 0 and share.ending is Ending.FILL)
        self.end = share.start + whole * batch if share.ending is Ending.DROP else share.length

    def reached(self, items: int) -> int:
        return min(self.end, self._share.start + items * self._batch)

    def blocks(self, order: Order) -> Iterator[list[list[int]]]:
        share = self._share
        for number in range(self.size):
            start = share.start + number * self._batch
            samples = order.at(start, 1, min(self._batch, share.length - start))
            if share.ending is Ending.FILL:
                samples = np.resize(samples, self._batch)  # repeats samples, beginning with the first one
            yield [balanced(samples, self._lengths[samples], share.num_replicas)[share.rank]]


def balanced(samples: Indices, lengths: Indices, num_replicas: int) -> list[list[int]]:
    """Divide samples among the ranks: equally many (or one less for some), with about as many tokens.

    The samples are sorted by length, the longest first, and cut into rows of one sample for each rank. The
    longest sample of a row goes to the rank with the fewest tokens so far, and so on. The ranks then differ
    by less than the longest sample.
    """
    descending = np.argsort(-lengths, kind="stable")
    tokens = np.zeros(num_replicas, np.int64)
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    # The incomplete row comes first, so that it goes to the first ranks: `Share` expects these to have more.
    rest = len(samples) % num_replicas
    rows = [descending[:rest], *descending[rest:].reshape(-1, num_replicas)]
    for number, row in enumerate(rows):
        ranks = np.arange(len(row)) if number == 0 else np.argsort(tokens, kind="stable")
        for rank, at in zip(ranks.tolist(), row.tolist()):
            shares[rank].append(int(samples[at]))
            tokens[rank] += lengths[at]
    return shares
