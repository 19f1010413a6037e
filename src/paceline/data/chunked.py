"""ChunkedShuffle: a shuffle for data that lies on disk in blocks, such as Parquet's row groups.

Whole blocks are permuted, and then the samples within each window of a few neighbouring blocks. Both
permutations are computed as needed, and not stored.
"""

from __future__ import annotations

from collections.abc import Sized

import numpy as np

from paceline.arguments import Arguments
from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.order import Indices, Order, Shuffled, derive_key, places_from


class ChunkedShuffle(DistributedSampler):
    """`DistributedSampler` with a shuffle that reads from disk in blocks of neighbouring samples.

    The blocks are permuted; then the samples of `window_blocks` blocks at a time are permuted among each
    other. All ranks are in the same window at the same time, so the ranks of a host share its blocks in the
    page cache. A reader that keeps the window's blocks decoded holds `window_samples` samples, and reads each
    block once; the sampler itself stores nothing. Everything else is as in `DistributedSampler`.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        seed: The seed of the permutations; any integer, the same on all ranks.
        drop_last: Leave up to num_replicas - 1 samples out, rather than repeat some.
        block_size: Neighbouring samples that are read together: rows of a row group. Sample i lies in block
            i // block_size; the last block may be shorter.
        window_blocks: Number of blocks whose samples are mixed. More blocks mix better, and take more memory
            in the reader.
        pad: Repeat samples if they do not divide evenly. False: every sample exactly once.
        reshuffle: Begin the next epoch with each iteration. False: only `set_epoch` changes the epoch.
        dataset_id: Name of the data in a saved state; None: the data set's fingerprint or its type.

    Raises:
        ConfigError: As DistributedSampler; or a size below 1.

    Example:
        6 samples in blocks of 2, window_blocks=2, two ranks: the first two steps take samples 0, 1, 4, 5 in
        some order, and the last one 2, 3.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        block_size: int,
        window_blocks: int = 16,
        pad: bool = True,
        reshuffle: bool = True,
        dataset_id: str | None = None,
    ) -> None:
        check = Arguments(self.name)
        self.block_size = check.whole("block_size", block_size, least=1)
        self.window_blocks = check.whole("window_blocks", window_blocks, least=1)
        super().__init__(
            dataset,
            num_replicas,
            rank,
            True,
            seed,
            drop_last,
            pad=pad,
            reshuffle=reshuffle,
            dataset_id=dataset_id,
        )
        self._identity |= {"block_size": self.block_size, "window_blocks": self.window_blocks}

    @property
    def window_samples(self) -> int:
        """The most samples that a reader holds if it keeps the blocks of a window."""
        return min(self._length, self.block_size * self.window_blocks)

    def _order(self, epoch: int) -> Order:
        return Chunked(self._length, self.block_size, self.window_blocks, self.seed, epoch)


class Chunked:
    """The order of ChunkedShuffle.

    Words: a *slot* is a position in the sequence of blocks. The short block, if there is one, is in slot
    `_short`, which is drawn at random; the full blocks are permuted over the other slots.
    """

    def __init__(self, length: int, block_size: int, window_blocks: int, seed: int, epoch: int) -> None:
        self.length = length
        self._block_size = block_size
        self._window = block_size * window_blocks
        self._seed = (seed, epoch)
        full, self._missing = divmod(length, block_size)
        self._missing = block_size - self._missing if self._missing else 0
        self._full = Shuffled(full, derive_key(*self._seed, "blocks"))
        self._num_slots = full + (self._missing > 0)
        last = derive_key(*self._seed, "short block") % self._num_slots if self._num_slots else 0
        self._short = last if self._missing else self._num_slots
        # Places before this one are where they would be if all blocks were full.
        self._short_end = self._short * block_size + block_size - self._missing

    def at(self, start: int, stride: int, count: int) -> Indices:
        places = places_from(start, stride, count)
        # Positions in a sequence in which the short block is full; its missing samples are skipped.
        padded = np.where(places < self._short_end, places, places + self._missing)
        parts = []
        while len(padded):
            window = int(padded[0]) // self._window
            inside = int(np.searchsorted(padded, (window + 1) * self._window))
            parts.append(self._mix(window, places[:inside]))
            places, padded = places[inside:], padded[inside:]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _mix(self, window: int, places: Indices) -> Indices:
        first = self._place_of(window * self._window)
        size = min(self.length, self._place_of((window + 1) * self._window)) - first
        mixed = Shuffled(size, derive_key(*self._seed, "window", window)).map(places - first) + first
        padded = np.where(mixed < self._short_end, mixed, mixed + self._missing)
        slots, offsets = np.divmod(padded, self._block_size)
        is_short = slots == self._short
        full = slots - (slots > self._short)
        blocks = np.full_like(slots, self._num_slots - 1)
        blocks[~is_short] = self._full.map(full[~is_short])
        return blocks * self._block_size + offsets

    def _place_of(self, padded: int) -> int:
        return padded - (self._missing if padded > self._short_end else 0)
