"""The steps and the state of a `ShardedOptimizer`, which each front end mixes into its optimizer.

The front end makes two kinds of optimizers: one of all parameters, and one or more of one rank's pieces.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, TypeAlias

from paceline.errors import ConfigError
from paceline.reducer.between_hosts.options import BetweenHosts
from paceline.reducer.communicator import Communicator
from paceline.reducer.framework_ops import FrameworkOps, Tensor
from paceline.reducer.model_agreement import ModelDescription, check_agreement
from paceline.sharding.journal import Journal, Part, storage_of_all
from paceline.sharding.journal_layout import Slot, split
from paceline.sharding.optimizer_arguments import OWNER, no_journal, refuse_copies
from paceline.sharding.optimizer_kind import Kind
from paceline.sharding.partition import Extent, Piece, deal
from paceline.sharding.shards import Shards
from paceline.sharding.shared_parameters import SharedStorage
from paceline.sharding.shared_step import SharedStep
from paceline.sharding.step_barriers import Call
from paceline.sharding.step_exchange import exchange_over
from paceline.sharding.whole_state import Whole, gather_states, put_together

JournalPlan: TypeAlias = tuple[SharedStorage[Tensor], list[list[Slot]]]
"""The storage of the journaled parameters, and the slots of the optimizer's state for each parameter."""

MAKING = "make the optimizer"
"""How errors on other ranks describe the constructor."""


class ShardedSteps(Generic[Tensor]):
    """The part of `ShardedOptimizer` that does not depend on the framework."""

    rank: int
    world_size: int
    _shards: Shards[Tensor]
    _keeps_journal: bool
    _journal: Journal[Tensor] | None = None
    _communicator: Communicator[Tensor] | None

    def _begin(self, peers: Any, optimizer_class: type[Any], reduce_through: str, journal: bool) -> None:
        self._peers, self._reduce_through = peers, reduce_through
        self.rank, self.world_size = peers.rank, peers.world_size
        self._keeps_journal = journal and self.world_size > 1
        self._agreed = {
            "optimizer_class": f"{optimizer_class.__module__}.{optimizer_class.__qualname__}",
            "reduce_through": reduce_through,
            "journal": str(journal),
        }

    def _agree(
        self,
        ops: FrameworkOps[Tensor],
        names: Sequence[str],
        parameters: Sequence[Tensor],
        options: Mapping[str, str],
        doing: str = MAKING,
    ) -> None:
        """Raise on every rank if the ranks have passed different parameters. Collective."""
        if self.world_size == 1:
            return
        described = tuple(
            description
            for name, parameter in zip(names, parameters, strict=True)
            for description in ops.describe(name, parameter, ops.is_trained(parameter))
        )
        description = ModelDescription(described, (), {**self._agreed, **options}, doing=doing)
        check_agreement(description, self._peers.exchange, self._peers.timeout_s)

    def _start(
        self,
        shards: Shards[Tensor],
        connect: Callable[..., Communicator[Tensor]],
        on_host: bool,
        look: Callable[[], object],
        spell: Callable[[], dict[str, str]],
    ) -> None:
        """Connect the ranks; no piece is assigned yet. Collective."""
        self._shards, self._communicator, exchange = shards, None, None
        self._loads = [0] * self.world_size
        if self.world_size > 1:
            self._communicator = connect(
                self._peers,
                on_host=on_host,
                reduce_through=self._reduce_through,
                between_hosts=BetweenHosts(owner=OWNER, compression=None, deterministic=None),
            )
            exchange = exchange_over(self._communicator, shards.ops, on_host=on_host)
        self._steps: SharedStep[Whole] = SharedStep(shards, self._communicator, exchange, look, spell)

    def _deal(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        kinds: Sequence[Kind],
        fit: Callable[[list[Piece], list[Extent]], list[Piece]] = lambda pieces, _: pieces,
    ) -> None:
        """Assign more parameters to the ranks. Earlier assignments stay, because their state lies on those
        ranks.
        """
        shards = self._shards
        first = len(shards.parameters)
        extents = shards.extents(parameters)
        is_frozen = [not shards.ops.is_trained(parameter) for parameter in parameters]
        is_cut = [kind is Kind.ELEMENTS for kind in kinds]
        pieces = fit(deal(extents, is_frozen, is_cut, self._loads), extents)
        if self._keeps_journal:
            pieces = split(pieces, [extent.itemsize for extent in extents])
            self._journal = None  # it lacks the new parameters
        pieces = [replace(piece, parameter=first + piece.parameter) for piece in pieces]
        shards.add(parameters, names, pieces)

    # --- a step ---

    def _make_step(self, kwargs: Mapping[str, Any], *, has_data: bool = True) -> bytes:
        """Make one step of all parameters. Collective.

        Returns:
            For each parameter whether it had a gradient; empty if no rank has data left.
        """
        shards, steps = self._shards, self._steps
        steps.check_unbroken()
        gradients: list[Any] | None = None
        has_gradient = b""
        try:
            shards.follow()
            if has_data:
                gradients = shards.gradients()
                has_gradient = bytes([gradient is not None for gradient in gradients])
            to_make = self._plan_step(gradients or ())
        except ConfigError as error:
            steps.refuse(error)
            raise
        joined = steps.sync(Call.STEP if has_data else Call.JOINED_STEP, has_gradient)
        if not has_data and not joined:
            return b""

        def complete(rank: int, gone: Callable[[], set[int]], until: float) -> bool:
            journal = self._journal
            if journal is None:
                return False
            if gradients is None:  # another rank has them
                return journal.await_completion(rank, joined, gone, until)
            return journal.complete(rank, lambda of: self._part_of(of, gradients, kwargs), gone, until)

        try:
            with steps.updating(complete, lambda: self._begin_journal(to_make)):
                if joined:
                    has_gradient = self._lend(joined, gradients, has_gradient)
                has_written = self._sees_writes()  # after `_begin_journal`, which may have made the journal
                steps.make(lambda: self._step_own(gradients, kwargs), has_gradient, has_written)
        finally:
            shards.end_loans()
        return has_gradient

    @abstractmethod
    def _step_own(self, gradients: Sequence[Any] | None, kwargs: Mapping[str, Any]) -> None:
        """Update this rank's shard, with the hyperparameters that users see and change."""

    def _sees_writes(self) -> Callable[[], bool] | None:
        """A function that returns whether a step that raised has written anything. None: compare tensor
        versions.
        """
        return None if self._journal is None else self._journal.has_written

    def _lend(self, joined: Sequence[int], gradients: Sequence[Any] | None, has_gradient: bytes) -> bytes:
        """Send each rank that has no data left the gradients of its shard. Collective."""
        assert self._communicator is not None
        ops, parameters = self._shards.ops, self._shards.parameters
        root = next(rank for rank in range(self.world_size) if rank not in joined)
        # On the parameters' device, because the communicator moves tensors of that device.
        known = ops.beside(ops.from_bytes(has_gradient or bytes(len(parameters))), parameters[0])
        self._communicator.broadcast([known], root=root)
        has_gradient = bytes(known.tolist())
        for rank in joined:
            self._shards.send_gradients(self._communicator, rank, root, gradients, has_gradient)
        return has_gradient

    # --- the journal ---

    def _plan_step(self, gradients: Sequence[Any]) -> JournalPlan[Tensor] | None:
        """The data for a new journal; None: no journal must be made."""
        if not self._keeps_journal:
            return None
        if self._are_scattered(gradients):
            raise no_journal("reduce='scatter': no rank has the gradients of another one's part")
        storage = storage_of_all(self._shards.parameters, self.world_size)
        if self._journal is not None and self._journal.storage is storage:
            return None
        return storage, self._slots()

    def _are_scattered(self, gradients: Sequence[Any]) -> bool:
        return any(type(gradient) is self._shards.ops.stand_in for gradient in gradients)

    @abstractmethod
    def _slots(self) -> list[list[Slot]]: ...

    def _begin_journal(self, to_make: JournalPlan[Tensor] | None) -> None:
        """Make the journal if there is a plan, and copy this rank's state into it. Collective if there is a
        plan.
        """
        if to_make is not None:
            self._journal = Journal(self._shards, *to_make, self._peers.timeout_s)
        if self._journal is not None and not self._journal.is_ready:
            self._journal.make_ready(self._own_part({}))

    @abstractmethod
    def _own_part(self, kwargs: Mapping[str, Any]) -> Part[Tensor]: ...

    @abstractmethod
    def _part_of(
        self, rank: int, gradients: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[Part[Tensor]]:
        """The optimizers of another rank's shard, with these gradients and the current hyperparameters."""

    # --- state ---

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all ranks on one rank. Collective.

        If a rank is lost and the optimizer keeps a journal, each surviving rank reads the whole state from
        the journal, and waits for no other rank.

        Args:
            to: The rank whose `state_dict()` returns the state afterwards, as of this call.

        Raises:
            MismatchError: Another rank makes a step instead.

        Example:
            Both ranks call it, and rank 0 saves `optimizer.state_dict()`, which any rank, and the optimizer
            that is not sharded, can load.
        """
        self._steps.consolidate(to, self.rank, self.world_size, self._gather, self._state_in_journal)

    def _gather(self, to: int) -> Whole:
        return put_together(self._shards, gather_states(self._shards, self._held, self._communicator, to))

    @abstractmethod
    def _held(self, number: int) -> Mapping[Any, Any] | None: ...

    def _state_in_journal(self) -> Whole | None:
        """The state of all ranks from the journal; None if the journal does not have all of it."""
        journal = self._journal
        if journal is None or not journal.knows_all():
            return None
        states = ((number, journal.state(number)) for number in range(len(self._shards.pieces)))
        return put_together(self._shards, states)

    def _consolidated(self) -> Whole:
        if self.world_size == 1:
            self.consolidate_state_dict()
        return self._steps.consolidated(self.rank)

    def _note_loaded(self) -> None:
        if self._journal is not None:
            self._journal.note_loaded()
        self._steps.begin_anew()

    def __getstate__(self) -> dict[str, Any]:
        refuse_copies()
