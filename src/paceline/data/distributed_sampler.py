"""DistributedSampler: replaces torch's; it stores no list, need not repeat samples, and can resume.

Places are dealt to the ranks in turn. So the batches of all ranks in one step are consecutive places, and one
process with a batch num_replicas times as large gets the same global batches.
"""

from __future__ import annotations

from collections.abc import Sized

from paceline.arguments import Arguments
from paceline.data.deal import Deal, Ending, SampleDeal, Share
from paceline.data.order import InOrder, Order, Shuffled, derive_key
from paceline.data.rank import find_rank
from paceline.data.resumable_epochs import EpochSampler
from paceline.data.sampler_arguments import identify, length_of, seed_of
from paceline.errors import ConfigError


class DistributedSampler(EpochSampler[int]):
    """Iterates over this rank's sample indices; pass it as `sampler=` to a torch `DataLoader`.

    It takes the arguments of `torch.utils.data.DistributedSampler`, and more. Each iteration is another epoch
    with another permutation, with or without `set_epoch`; every rank must iterate equally often. The
    permutation is computed as needed, so the memory does not depend on the number of samples, and an epoch
    starts at once.

    To save a position inside an epoch, call `commit(samples)` after each optimizer step and store
    `state_dict()` in the checkpoint. Samples that a loader's workers have only prefetched do not count.

    Args:
        dataset: Anything with a length, up to 2**63 - 1 samples. Only the length is used.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        shuffle: Permute the samples, differently in every epoch.
        seed: The seed of the permutation; any integer, the same on all ranks.
        drop_last: Leave up to num_replicas - 1 samples out, rather than repeat some.
        pad: Repeat samples if they do not divide evenly, so that all ranks have equally many. False: every
            sample exactly once; some ranks get one sample less than others.
        reshuffle: Begin the next epoch with each iteration. False: only `set_epoch` changes the epoch.
        dataset_id: Name of the data in a saved state; None: the data set's fingerprint or its type.

    Raises:
        ConfigError: The rank or the number of ranks is missing or out of range, or options contradict.

    Example:
        Two ranks, 5 samples, no shuffling: rank 0 iterates over 0, 2, 4 and rank 1 over 1, 3, 0;
        with pad=False rank 1 iterates over 1, 3.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        reshuffle: bool = True,
        dataset_id: str | None = None,
    ) -> None:
        num_replicas, rank = find_rank(self.name, num_replicas, rank)
        self._ending = choose_ending(self.name, drop_last, pad)
        self.dataset = dataset
        self.shuffle = Arguments(self.name).flag("shuffle", shuffle)
        self.seed = seed_of(self.name, seed)
        self.drop_last = self._ending is Ending.DROP
        known_as = identify(self.name, dataset, dataset_id)
        identity = {"dataset": known_as, "seed": self.seed, "shuffle": self.shuffle}
        super().__init__(
            length_of(self.name, dataset), num_replicas, rank, reshuffle=reshuffle, identity=identity
        )

    def _deal(self, start: int) -> Deal[int]:
        return SampleDeal(Share(self._length, start, self.num_replicas, self.rank, self._ending))

    def _order(self, epoch: int) -> Order:
        if not self.shuffle:
            return InOrder(self._length)
        return Shuffled(self._length, derive_key(self.seed, epoch))


def choose_ending(name: str, drop_last: bool, pad: bool, *, is_global: bool = False) -> Ending:
    """The ending that two arguments ask for."""
    check = Arguments(name)
    drop_last, pad = check.flag("drop_last", drop_last), check.flag("pad", pad)
    if drop_last and not pad:
        raise ConfigError(
            f"{name}: drop_last=True and pad=False contradict each other.",
            likely="pad=False means that every sample is seen exactly once",
            hint="leave drop_last out; or leave pad out, to drop samples",
        )
    if drop_last:
        return Ending.DROP
    if not pad:
        return Ending.UNEVEN
    return Ending.FILL if is_global else Ending.PAD
