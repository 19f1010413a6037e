"""WeightedDistributedSampler: samples drawn by weight, divided among the ranks.

Draw number p of an epoch is a function of (seed, epoch, p) on any rank, so draws can be dealt out and resumed
like the places of a permutation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.arguments import Arguments
from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.order import Indices, Order, derive_key, places_from
from paceline.data.sampler_arguments import row_of
from paceline.errors import ConfigError

Floats = npt.NDArray[np.float64]


class WeightedDistributedSampler(DistributedSampler):
    """Draws samples with probabilities in proportion to weights; pass it as `sampler=` to a `DataLoader`.

    It takes the arguments of torch's WeightedRandomSampler, which does not know of ranks, and those of
    `DistributedSampler`. All ranks together draw the samples that one process would draw. `commit()` and
    `state_dict()` work as in `DistributedSampler`.

    Memory per rank: with replacement 16 bytes per sample. Without replacement 8 bytes per sample and 8 per
    draw, and at the start of an epoch, for the time of a sort, some 75 more bytes per sample.

    Args:
        weights: A weight for each sample of the data set; 0 or more, not all 0. They need not add up to 1.
        num_samples: Number of draws in one epoch, of all ranks together; None: as many as weights.
        replacement: Whether a sample may be drawn again in the same epoch. Without replacement, samples of
            large weights come early, and a whole epoch holds each sample of a positive weight once.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        seed: Any integer, the same on all ranks.
        drop_last: Leave up to num_replicas - 1 draws out, rather than repeat some.
        pad: Repeat draws if they do not divide evenly. False: some ranks get one draw less.
        reshuffle: Begin the next epoch with each iteration. False: only `set_epoch` changes the epoch.

    Raises:
        ConfigError: As in DistributedSampler; or a weight is negative or not finite, all are 0, or without
            replacement there are fewer positive weights than draws.

    Example:
        With weights [0, 1, 1], num_samples=2 and no replacement, one of two ranks gets sample 1 and the other
        sample 2.

    Source: without replacement, Efraimidis and Spirakis, Information Processing Letters 97(5), 2006.
    """

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[np.floating],
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        reshuffle: bool = True,
    ) -> None:
        self._weights = checked_weights(self.name, weights)
        check = Arguments(self.name)
        self.replacement = replacement = check.flag("replacement", replacement)
        draws = len(self._weights)
        if num_samples is not None:
            draws = check.whole("num_samples", num_samples, least=0)
        positive = int((self._weights > 0).sum())
        most = draws if replacement and positive else positive
        if draws > most:
            raise ConfigError(
                f"{self.name}: num_samples is out of range.",
                expected=f"without replacement at most {positive}, the number of positive weights",
                got=f"{draws}, replacement={replacement}",
                hint=f"num_samples={positive}, or replacement=True",
                argument="num_samples",
            )
        self._sums = np.cumsum(self._weights) if replacement else np.empty(0)
        digest = hashlib.blake2b(self._weights.tobytes(), digest_size=8).hexdigest()
        super().__init__(
            range(draws),
            num_replicas,
            rank,
            True,
            seed,
            drop_last,
            pad=pad,
            reshuffle=reshuffle,
            dataset_id=f"{len(self._weights)} weights ({digest}), "
            f"{'with' if replacement else 'without'} replacement",
        )

    def _order(self, epoch: int) -> Order:
        key = derive_key(self.seed, epoch, "weighted")
        if self.replacement:
            return Draws(self._sums, self._length, key)
        return Listed(_draw_without_replacement(self._weights, self._length, key))


class Draws:
    """Independent draws: place -> sample, with probabilities given by running sums of weights."""

    def __init__(self, sums: Floats, length: int, key: int) -> None:
        self.length = length
        self._sums = sums
        self._key = key

    def at(self, start: int, stride: int, count: int) -> Indices:
        if count == 0:
            return np.empty(0, np.int64)
        total = self._sums[-1]
        points = uniform(places_from(start, stride, count), self._key) * total
        # Rounding may give the total itself, which is beyond the last sample of a positive weight.
        points = np.minimum(points, np.nextafter(total, 0))
        indices: Indices = np.searchsorted(self._sums, points, side="right").astype(np.int64, copy=False)
        return indices


class Listed:
    def __init__(self, indices: Indices) -> None:
        self.length = len(indices)
        self._indices = indices

    def at(self, start: int, stride: int, count: int) -> Indices:
        return (
            self._indices[start : start + (count - 1) * stride + 1 : stride] if count else self._indices[:0]
        )


def uniform(places: Indices, key: int) -> Floats:
    """Independent random numbers in [0, 1), one for each place: SplitMix64 by counter, 53 bits."""
    z = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw_without_replacement(weights: Floats, count: int, key: int) -> Indices:
    positive = np.flatnonzero(weights)
    times = -logarithm(1.0 - uniform(positive, key)) / weights[positive]
    if count < len(times):
        # Keep all times up to the last one that is drawn, so that ties are broken by index below.
        latest = np.partition(times, count - 1)[count - 1] if count else -1.0
        early = times <= latest
        positive, times = positive[early], times[early]
    return positive[np.argsort(times, kind="stable")[:count]]


def logarithm(x: Floats) -> Floats:
    """Natural logarithm of numbers in (0, 1], to 1e-14, with the same bits on every processor.

    numpy's logarithm differs in the last bit between processors, so ranks on different processors could
    disagree on the order of two samples. This one uses only +, -, * and /, which round alike everywhere.
    """
    fraction, exponent = np.frexp(x)
    is_small = fraction < 0.7071067811865476
    fraction = np.where(is_small, fraction * 2, fraction)
    s = (fraction - 1) / (fraction + 1)  # log(fraction) = 2 (s + s^3 / 3 + s^5 / 5 + ...), |s| < 0.172
    square = s * s
    total = np.zeros_like(s)
    for odd in range(19, 0, -2):
        total = total * square + 1.0 / odd
    result: Floats = 2 * s * total + (exponent - is_small) * 0.6931471805599453
    return result


def checked_weights(name: str, weights: Sequence[float] | npt.NDArray[np.floating]) -> Floats:
    """A copy of the weights as float64."""
    expected = "one finite number for each sample, 0 or more, with a positive, finite sum"
    array = row_of(name, "weights", weights, expected).astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size or (array.size and not array.sum() > 0) or np.isinf(array.sum()):
        where = f"weights[{bad[0]}] = {array[bad[0]]}, " if bad.size else ""
        hint = "give samples that must not be drawn a weight of 0, and some others more"
        seen = f"{where}{array.size} weights with a sum of {array.sum()}"
        raise Arguments(name).refuse("weights", weights, expected, hint, seen=seen)
    return array
