"""A sampler that gives every rank its share of a data set, a different one in every epoch.

The one idea: all ranks draw the same permutation from (seed, epoch), and rank r takes places r,
r + world_size, ... of it. So the batches of one step, of all ranks together, are consecutive places of the
permutation, and one process with a batch world_size times as large sees the same global batches.

Imports only the standard library, numpy, `env` and `errors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt

from paceline.env import read_rank_environment
from paceline.errors import ConfigError


def rank_indices(
    length: int, rank: int, world_size: int, *, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> npt.NDArray[np.int64]:
    """The samples of one rank in one epoch; the same number on every rank.

    Args:
        length: Number of samples in the data set.
        rank: Of this process.
        world_size: Number of ranks.
        seed: The same on all ranks.
        epoch: Another epoch is another permutation.
        shuffle: Permute; otherwise in order.
        drop_last: Leave out up to world_size - 1 samples; otherwise repeat as many from the start.

    Example:
        length=5, world_size=2, no shuffle: rank 0 gets [0, 2, 4] and rank 1 gets [1, 3, 0];
        with drop_last [0, 2] and [1, 3].
    """
    order = np.arange(length, dtype=np.int64)
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(order)
    share = samples_per_rank(length, world_size, drop_last=drop_last)
    places = np.arange(rank, share * world_size, world_size)
    return order[places % length] if length else order


def samples_per_rank(length: int, world_size: int, *, drop_last: bool) -> int:
    """How many samples `rank_indices` gives to each rank."""
    return length // world_size if drop_last else -(-length // world_size)


class DistributedSampler:
    """Iterates over this rank's sample indices; pass it as `sampler=` to a torch `DataLoader`.

    The arguments are those of `torch.utils.data.DistributedSampler`. No framework is needed.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None: as the launcher says (WORLD_SIZE).
        rank: Of this process; None: as the launcher says (RANK).
        shuffle: Permute the samples, differently in every epoch (see `set_epoch`).
        seed: Of the permutation; the same on all ranks.
        drop_last: Leave samples out, rather than repeat some, where they do not divide evenly.

    Raises:
        ConfigError: The rank or the number of ranks is missing or out of range.

    Example:
        Of two ranks and 4 samples, without shuffling, rank 0 iterates over 0, 2 and rank 1 over 1, 3.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        if num_replicas is None or rank is None:
            place = read_rank_environment(rank=rank, world_size=num_replicas)
            rank, num_replicas = place.rank, place.world_size
        self.num_replicas = num_replicas
        self.rank = rank
        if self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            raise ConfigError(
                "DistributedSampler: the rank is out of range.",
                expected="num_replicas >= 1 and 0 <= rank < num_replicas",
                got=f"rank={self.rank}, num_replicas={self.num_replicas}",
            )
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def __len__(self) -> int:
        return samples_per_rank(len(self.dataset), self.num_replicas, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[int]:
        indices = rank_indices(
            len(self.dataset),
            self.rank,
            self.num_replicas,
            seed=self.seed,
            epoch=self.epoch,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )
        # One at a time: a list of Python integers would take 28 bytes for each sample.
        return map(int, indices)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; call it with the same epoch on every rank before iterating."""
        self.epoch = epoch
