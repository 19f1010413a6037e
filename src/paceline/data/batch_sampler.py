"""DistributedBatchSampler: global batches that do not depend on the number of ranks, for Paddle and torch."""

from __future__ import annotations

from collections.abc import Sized

from paceline.arguments import Arguments
from paceline.data.deal import BatchDeal, Deal, Ending, InTurnDeal, Share
from paceline.data.distributed_sampler import choose_ending
from paceline.data.order import InOrder, Order, Shuffled, derive_key
from paceline.data.rank import find_rank
from paceline.data.resumable_epochs import EpochSampler
from paceline.data.sampler_arguments import identify, length_of, seed_of
from paceline.errors import ConfigError
from paceline.reducer.sum_order import played_by


class DistributedBatchSampler(EpochSampler[list[int]]):
    """Iterates over this rank's batches of sample indices; pass it as `batch_sampler=` to a `DataLoader`.

    It takes the arguments of `paddle.io.DistributedBatchSampler`, and more, and works in the loaders of torch
    and of Paddle. Each iteration is a new epoch, as in `DistributedSampler`. `commit()`, once after each
    optimizer step, and `state_dict()` work as there, but count batches.

    Args:
        dataset: Anything with a length. Only the length is used.
        batch_size: Samples of one step on each rank; None with `global_batch_size`.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.
        shuffle: Permute the samples, differently in every epoch.
        drop_last: Leave out a last step that has fewer samples, on all ranks together. (Paddle's sampler
            first repeats samples, and then leaves out a rank's incomplete batch, which may drop fewer.)
        seed: The seed of the permutation; any integer, the same on all ranks.
        pad: Repeat samples in a last step that has fewer: with `batch_size` until all ranks have equally
            many, with `global_batch_size` until the step is complete. False: every sample exactly once; in
            the last step some ranks get one sample less, or no batch at all.
        global_batch_size: Samples of one step on all ranks together. Training goes through the same batches
            on 2 ranks as on 8, up to the last step. If it is no multiple of the number of ranks, some ranks
            get one sample less: weight their gradients by the number of samples.
        virtual_ranks: Yield in each step one batch for each virtual rank that this process plays, in their
            order, for `ddp.steps()` of a model that is wrapped with the same number. It needs
            `global_batch_size`, which is then divided among the virtual ranks; the last step is padded or
            dropped. `commit()` counts steps.
        reshuffle: Begin the next epoch with each iteration. False: only `set_epoch` changes the epoch.
        dataset_id: Name of the data in a saved state; None: the data set's fingerprint or its type.

    Raises:
        ConfigError: An argument is missing, out of range or contradicts another.

    Example:
        With two ranks, 7 samples in order and batch_size=2, rank 0 iterates over [0, 2], [4, 6] and
        rank 1 over [1, 3], [5, 0]; with pad=False over [1, 3], [5]. With 5 samples and
        global_batch_size=4 they iterate over [0, 2], [4, 1] and [1, 3], [0, 2]. So the steps have the samples
        0, 1, 2, 3 and 4, 0, 1, 2, as they would on one rank. With virtual_ranks=4 as well, rank 0 iterates
        over [0], [1], [4], [0] and rank 1 over [2], [3], [1], [2].
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        *,
        seed: int = 0,
        pad: bool = True,
        global_batch_size: int | None = None,
        virtual_ranks: int | None = None,
        reshuffle: bool = True,
        dataset_id: str | None = None,
    ) -> None:
        num_replicas, rank = find_rank(self.name, num_replicas, rank)
        self.virtual_ranks = virtual_ranks
        self._dealt_to, self._played = num_replicas, range(rank, rank + 1)
        if virtual_ranks is not None:
            _check_virtual(self.name, batch_size, pad)
            self._played = played_by(self.name, virtual_ranks, rank, num_replicas)
            self._dealt_to = virtual_ranks
        self.global_batch_size = choose_global_batch(self.name, batch_size, global_batch_size, self._dealt_to)
        self.batch_size = batch_size
        self._ending = choose_ending(self.name, drop_last, pad, is_global=batch_size is None)
        self.dataset = dataset
        self.shuffle = Arguments(self.name).flag("shuffle", shuffle)
        self.seed = seed_of(self.name, seed)
        self.drop_last = self._ending is Ending.DROP
        known_as = identify(self.name, dataset, dataset_id)
        identity = {"dataset": known_as, "seed": self.seed, "shuffle": self.shuffle}
        super().__init__(
            length_of(self.name, dataset), num_replicas, rank, reshuffle=reshuffle, identity=identity
        )

    # --- attributes of Paddle's sampler ---

    @property
    def nranks(self) -> int:
        """`num_replicas`, as Paddle calls it."""
        return self.num_replicas

    @property
    def local_rank(self) -> int:
        """`rank`, as Paddle calls it: the rank among all ranks, not among those of a host."""
        return self.rank

    @property
    def num_samples(self) -> int:
        """Number of this rank's samples in a whole epoch. As in Paddle, drop_last is ignored here.

        Example:
            7 samples, two ranks: 4 on each, because one is repeated; with pad=False 4 and 3; with
            global_batch_size=6 two steps of 3 on each.
        """
        return sum(map(self._samples_of, self._played))

    @property
    def total_size(self) -> int:
        """`num_samples` of all ranks together."""
        return sum(map(self._samples_of, range(self._dealt_to)))

    def _samples_of(self, rank: int) -> int:
        whole, rest = divmod(self._length, self.global_batch_size)
        if self._ending is Ending.FILL:
            whole, rest = whole + (rest > 0), 0
        ending = Ending.UNEVEN if self._ending is Ending.UNEVEN else Ending.PAD
        plain, last = (Share(0, 0, self._dealt_to, rank, each) for each in (Ending.UNEVEN, ending))
        return whole * plain.part_of(self.global_batch_size) + last.part_of(rest)

    def commit(self, count: int = 1) -> None:
        """Record that an optimizer step has used `count` more of this rank's batches.

        With `virtual_ranks`, it counts steps. See DistributedSampler.
        """
        super().commit(count * len(self._played))

    def _deal(self, start: int) -> Deal[list[int]]:
        shares = (Share(self._length, start, self._dealt_to, rank, self._ending) for rank in self._played)
        return InTurnDeal([BatchDeal(share, self.global_batch_size) for share in shares])

    def _order(self, epoch: int) -> Order:
        if not self.shuffle:
            return InOrder(self._length)
        return Shuffled(self._length, derive_key(self.seed, epoch))


def _check_virtual(name: str, batch_size: object, pad: object) -> None:
    check, hint = Arguments(name), "global_batch_size=64 is the same step on any number of processes"
    check.require(batch_size is None, "batch_size", batch_size, "None with virtual_ranks", hint)
    hint = "leave pad out, or pass drop_last=True"
    expected = "True with virtual_ranks: each of them has a batch in each step"
    check.require(pad is not False, "pad", pad, expected, hint)


def choose_global_batch(
    name: str, batch_size: int | None, global_batch_size: int | None, num_replicas: int
) -> int:
    """Samples of one step on all ranks together, from the one of the two arguments that was given."""
    check = Arguments(name)
    if (batch_size is None) == (global_batch_size is None):
        raise ConfigError(
            f"{name}: one of batch_size and global_batch_size is needed.",
            expected="a number for one, None for the other",
            got=f"batch_size={batch_size}, global_batch_size={global_batch_size}",
            hint="batch_size counts the samples of one rank, global_batch_size those of all ranks",
        )
    if batch_size is not None:
        return check.whole("batch_size", batch_size, least=1) * num_replicas
    hint = "each step has a sample for each rank"
    return check.whole("global_batch_size", global_batch_size, least=num_replicas, hint=hint)  # type: ignore[arg-type]
