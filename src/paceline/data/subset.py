"""SubsetDistributedSampler: samples a part of a data set, which is given by indices."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.arguments import Arguments
from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.order import Indices, Order
from paceline.data.sampler_arguments import row_of


class SubsetDistributedSampler(DistributedSampler):
    """`DistributedSampler` over some samples of a data set, such as a fold or a split.

    It takes 8 bytes for each index on every rank. Everything else is as in `DistributedSampler`. A saved
    state can only be loaded for the same indices in the same order.

    Args:
        indices: The indices of the samples, 0 or more; an index that is there twice is used twice per epoch.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        shuffle: Permute them, differently in every epoch.
        seed: The seed of the permutation; any integer, the same on all ranks.
        drop_last: Leave up to num_replicas - 1 samples out, rather than repeat some.
        pad: Repeat samples if they do not divide evenly. False: each exactly once.
        reshuffle: Begin the next epoch with each iteration. False: only `set_epoch` changes the epoch.

    Raises:
        ConfigError: As in DistributedSampler; or an index is negative or no integer.

    Example:
        With two ranks, indices [7, 8, 9], no shuffling and no padding, rank 0 iterates over 7, 9 and
        rank 1 over 8.
    """

    def __init__(
        self,
        indices: Sequence[int] | npt.NDArray[np.integer],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        reshuffle: bool = True,
    ) -> None:
        self._indices = checked_indices(self.name, indices)
        super().__init__(
            self._indices,
            num_replicas,
            rank,
            shuffle,
            seed,
            drop_last,
            pad=pad,
            reshuffle=reshuffle,
            dataset_id=hashlib.blake2b(self._indices.tobytes(), digest_size=8).hexdigest(),
        )

    def _order(self, epoch: int) -> Order:
        return Looked(self._indices, super()._order(epoch))


class Looked:
    """An order of positions in a list of indices: place -> indices[positions at that place]."""

    def __init__(self, indices: Indices, positions: Order) -> None:
        self.length = positions.length
        self._indices = indices
        self._positions = positions

    def at(self, start: int, stride: int, count: int) -> Indices:
        return self._indices[self._positions.at(start, stride, count)]


def checked_indices(
    name: str, indices: Sequence[int] | npt.NDArray[np.integer], what: str = "indices"
) -> Indices:
    """A copy of the indices as int64."""
    expected = "whole numbers, 0 or more, in one row"
    array = row_of(name, what, indices, expected)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or array.min() < 0:
        is_mask = array.dtype.kind == "b"
        hint = (
            "for a mask: numpy.flatnonzero(mask)"
            if is_mask
            else f"numpy.asarray({what}).min() must be 0 or more"
        )
        if array.dtype.kind == "f":
            hint = f"numpy.asarray({what}).astype(int) cuts fractions off"
        seen = f"{array.dtype}, shape {array.shape}, smallest {array.min()}"
        raise Arguments(name).refuse(what, indices, expected, hint, seen=seen)
    return array.astype(np.int64)
