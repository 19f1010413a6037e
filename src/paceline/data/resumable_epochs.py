"""Base class of the samplers: epochs that advance with each iteration, and can be resumed in the middle.

The progress of an epoch is one number: the place below which every rank has committed all samples after an
optimizer step. `EpochSampler` keeps it. Subclasses define the order of the samples, and how they are dealt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import length_hint
from typing import Any, Generic, TypeVar, cast

from paceline.arguments import Arguments
from paceline.data.deal import Deal
from paceline.data.order import Order
from paceline.data.sampler_arguments import check_state
from paceline.errors import ConfigError

Item = TypeVar("Item")


class EpochIterator(chain[Item]):
    """An iteration over one epoch.

    It begins, and takes the sampler's epoch, with its first item, because loaders make iterators that they
    never use. Its state counts the items that were drawn, for loaders that keep a state for each batch
    (StatefulDataLoader).
    """

    _sampler: EpochSampler[Item]
    _run: _Epoch[Item] | None

    @classmethod
    def over(cls, sampler: EpochSampler[Item]) -> EpochIterator[Item]:
        def lists() -> Iterator[Iterator[Item]]:
            run = one._run = sampler._begin()
            for items in run.deal.blocks(run.order):
                run.given += len(items)
                run.current = iter(items)
                yield run.current

        one = cast("EpochIterator[Item]", cls.from_iterable(lists()))
        one._sampler = sampler
        one._run = None
        return one

    def state_dict(self) -> dict[str, Any]:
        """The state as if all items that were drawn were committed."""
        if self._run is None:
            return self._sampler.state_dict()
        return self._sampler._state_at(self._run, self._run.drawn)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._run is not None:
            raise ConfigError(f"{self._sampler.name}: a state can't be loaded into an iteration under way.")
        self._sampler.load_state_dict(state)


class _Epoch(Generic[Item]):
    def __init__(self, epoch: int, deal: Deal[Item], order: Order) -> None:
        self.epoch = epoch
        self.deal = deal
        self.order = order
        self.given = 0
        self.current: Iterator[Item] = iter(())
        self.committed = 0

    @property
    def drawn(self) -> int:
        return self.given - length_hint(self.current)


class EpochSampler(Generic[Item]):
    """The common part of all samplers: epochs, commits, and states.

    Args:
        length: Places of an epoch.
        num_replicas: Number of ranks.
        rank: The rank of this process.
        reshuffle: Whether each iteration is a new epoch.
        identity: Names and values that a state must have in common with the sampler that loads it.
    """

    def __init__(
        self, length: int, num_replicas: int, rank: int, *, reshuffle: bool, identity: Mapping[str, Any]
    ) -> None:
        self.num_replicas = num_replicas
        self.rank = rank
        self.epoch = 0
        self._length = length
        self._reshuffle = Arguments(self.name).flag("reshuffle", reshuffle)
        self._identity = {"length": length, **identity}
        self._start = 0  # the place where the current iteration starts, or the next one if there is none
        self._is_pending = True  # whether the next iteration is over self.epoch, and not the epoch after it
        self._run: _Epoch[Item] | None = None

    @property
    def name(self) -> str:
        return type(self).__name__

    def _deal(self, start: int) -> Deal[Item]:
        raise NotImplementedError

    def _order(self, epoch: int) -> Order:
        raise NotImplementedError

    def __len__(self) -> int:
        """Number of this rank's items in the current or next epoch; after a resume, those that are left."""
        is_next_whole = self._run is None and not self._is_pending
        return self._deal(0 if is_next_whole else self._start).size

    def __iter__(self) -> Iterator[Item]:
        """Draw this rank's items of one epoch: the epoch that was set or loaded, else the next one."""
        return EpochIterator.over(self)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; call it with the same number on every rank.

        Without it each iteration is the next epoch (unless `reshuffle=False`). After `load_state_dict`,
        setting the epoch that was loaded keeps the position inside it.

        Raises:
            ConfigError: The epoch is negative.
        """
        epoch = Arguments(f"{self.name}.set_epoch").whole("epoch", epoch, least=0)
        if self._run is not None or epoch != self.epoch:
            self._start = 0
            self._run = None
        self.epoch = epoch
        self._is_pending = True

    def _begin(self) -> _Epoch[Item]:
        if not self._is_pending:
            self._start = 0
            self.epoch += self._reshuffle
        self._is_pending = False
        self._run = _Epoch(self.epoch, self._deal(self._start), self._order(self.epoch))
        return self._run

    def commit(self, count: int) -> None:
        """Record that an optimizer step has used `count` more of this rank's items.

        A state counts only committed items. Not collective, but every rank must commit its items after each
        step.

        Raises:
            ConfigError: More items would be committed than were drawn.
        """
        drawn = 0 if self._run is None else self._run.drawn
        count = Arguments(f"{self.name}.commit").whole("count", count, least=0)
        committed = count + (0 if self._run is None else self._run.committed)
        if committed > drawn:
            raise ConfigError(
                f"{self.name}.commit: more than was drawn in epoch {self.epoch}.",
                where=f"rank {self.rank} of {self.num_replicas}",
                expected=f"0 to {drawn} in all",
                got=f"{committed} (this call: count={count})",
                hint="count this rank's own samples (batches, if the sampler makes batches), once per step",
            )
        if self._run is not None:
            self._run.committed = committed

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch: the samples that all ranks have committed. Plain numbers and texts.

        Not collective. It assumes that every rank has committed as many steps as this one. If the ranks have
        unequally many items, save the state of rank 0, which has the most.
        """
        if self._run is not None:
            return self._state_at(self._run, self._run.committed)
        is_complete = 0 < self._start >= self._deal(self._start).end
        return self._describe(self.epoch, self._start, is_complete)

    def _state_at(self, run: _Epoch[Item], items: int) -> dict[str, Any]:
        position = run.deal.reached(items)
        return self._describe(run.epoch, position, position >= run.deal.end)

    def _describe(self, epoch: int, position: int, is_complete: bool) -> dict[str, Any]:
        state = {"version": 1, "sampler": self.name, "epoch": epoch, "position": position}
        return {**state, "is_complete": is_complete, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken, with any number of ranks; load the same state on every rank.

        The next iteration yields this rank's part of the samples that were not committed, each once over
        all ranks; if there are none, it is the next epoch.

        Raises:
            ConfigError: The state is from another data set (the error has both lengths), seed or kind of
                sampler.
        """
        check_state(self.name, state, self._identity)
        self.epoch = int(state["epoch"])
        self._is_pending = not state["is_complete"]
        self._start = int(state["position"]) if self._is_pending else self._length
        self._run = None
