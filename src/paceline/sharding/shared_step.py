"""The collective protocol of a sharded optimizer's step.

A step has two parts. In `sync` the ranks sync and compare what they are about to do. In `make` each rank
updates its shard, and the ranks exchange what they have written. `make` runs within `updating`, which records
a step that was begun and not completed, so that no rank takes half of a step for a whole one (`step_tables`,
`partial_steps`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from paceline import _core
from paceline.arguments import Arguments
from paceline.errors import (
    CollectiveError,
    ConfigError,
    DeadlineError,
    GroupClosedError,
    PacelineError,
    PeerLostError,
    RendezvousError,
)
from paceline.reducer.communicator import Communicator
from paceline.sharding.optimizer_arguments import OWNER
from paceline.sharding.partial_steps import partial_step_error, partial_steps
from paceline.sharding.shards import Shards
from paceline.sharding.shared_parameters import storage_of
from paceline.sharding.step_barriers import Call, Facts, StepBarriers, hash_options
from paceline.sharding.step_exchange import IDLE, Travel
from paceline.sharding.step_tables import Complete, StepTables

# The outcome of a rank's shard in a step, in this order:
_WRITTEN, _IDLE, _REFUSED, _RAISED = 0, IDLE, 2, 3
"""It is written; the rank had nothing to write; it raised before anything was written; it raised later."""
# Descriptions of the step, for errors after the loss of a rank.
NOTHING_WRITTEN = "nothing was written yet"
COMPLETE = "the step is complete: every rank's part is written"
HALF = "some parameters may be updated and others not"
State = TypeVar("State")


class SharedStep(Generic[State]):
    """The steps of one optimizer, on one rank."""

    def __init__(
        self,
        pieces: Shards[Any],
        communicator: Communicator[Any] | None,
        travel: Travel[Any] | None,
        look: Callable[[], object],
        spell: Callable[[], dict[str, str]],
    ) -> None:
        self._pieces = pieces
        self._travel = travel
        self._look, self._spell = look, spell
        self._step_tables = StepTables(lambda: pieces.storages if travel is not None else ())
        self._barriers: StepBarriers | None = None
        if communicator is not None and travel is not None:
            self._barriers = StepBarriers(
                travel.gather, communicator.all_gather, OWNER, lambda: pieces.parameters
            )
        self._seen: tuple[object, int] = (None, 0)
        self._route: tuple[object, Any] = (None, None)
        self._failure: BaseException | None = None
        self._refusal: BaseException | None = None
        self._state: State | None = None

    # --- a step ---

    def sync(self, call: Call, has_gradient: bytes) -> tuple[int, ...]:
        """Compare what this rank is about to do with the other ranks. Collective.

        Returns:
            The ranks that have no data left.

        Raises:
            MismatchError, UnusedParameterError, ConfigError: See `StepBarriers.sync`. Nothing was written.
            CollectiveError: A rank is lost or late. Nothing was written by any rank of this host.
        """
        if self._barriers is None:
            return ()
        options = self._hash_options()
        try:
            return self._barriers.sync(
                call, options, _core.hash_bytes(has_gradient), lambda: self._facts(call, has_gradient)
            )
        except PacelineError as error:
            # If a rank is lost just after the barrier, some ranks may return from it and others raise.
            has_begun = is_loss(error) and self._step_tables.refuse()
            if has_begun and call is Call.STEP:
                return ()  # another rank has begun: it passed the barrier, so all ranks make the same step
            if has_begun:  # without gradients this rank cannot write its shard
                self._report_failure(error)
            with _explaining(has_begun=has_begun):
                raise

    def refuse(self, error: ConfigError) -> None:
        """Report to the other ranks why this rank makes no step. Collective."""
        if self._barriers is not None:
            facts = Facts(Call.REFUSED, failure=str(error))
            try:
                self._barriers.sync(Call.REFUSED, 0, 0, lambda: facts)
            except PacelineError:
                return  # this rank's own error says more

    def updating(
        self, complete: Complete | None = None, prepare: Callable[[], None] = lambda: None
    ) -> _Updating:
        """A context for everything that writes to parameters.

        An exception within it breaks the optimizer (`check_unbroken` raises from then on), unless the step
        turns out to be complete.

        Raises:
            CollectiveError: At its beginning: another rank did not pass the barrier, or a rank is lost.
                Nothing was written, or `step_is_complete` is False.
        """
        return _Updating(functools.partial(self._begin, prepare), functools.partial(self._end, complete))

    def _begin(self, prepare: Callable[[], None]) -> None:
        try:
            prepare()
            if self._step_tables.begin():
                return
        except BaseException as error:
            has_begun = self._step_tables.refuse()  # if no rank has begun to write, none will
            self._report_failure(error)
            if has_begun:
                partial_steps.call_guards()
            with _explaining(has_begun=has_begun):
                raise
        assert self._travel is not None
        with _explaining(has_begun=False):
            self._travel.barrier()  # raises the error that another rank has reported
            raise CollectiveError(
                "Another rank could not meet all ranks.",
                likely="it was in this step, or in the last one of another optimizer of these parameters, in "
                "which a rank was lost or late",
                hint="wrap the model anew, over a new group, and make the optimizer anew, on every rank; the "
                "parameters need not be loaded",
            )

    def _end(self, complete: Complete | None, error: BaseException) -> None:
        if error is self._refusal:
            self._refusal = None
            return
        if not is_loss(error):
            self._report_failure(error)
        is_complete = bool(self._pieces.storages) and self._step_tables.settle(error, complete)
        reported = error
        if isinstance(error, CollectiveError) and not error.summary.startswith(OWNER):
            reported = explaining(
                OWNER, COMPLETE if is_complete else HALF, step_is_complete=is_complete
            ).explained(error)
        if not is_complete:
            self._failure = reported
            partial_steps.mark(self._own_parameters(), self._pieces.ops.versions, str(reported))
            partial_steps.call_guards()
        if reported is not error:
            raise reported from error

    def _report_failure(self, error: BaseException) -> None:
        if self._travel is not None:
            self._step_tables.give_up(f"{OWNER}.step: {type(error).__name__}: {error}")
            self._travel.fail(error)

    def _own_parameters(self) -> list[Any]:
        return [parameter for parameter in self._pieces.parameters if storage_of(parameter) is None]

    def make(
        self,
        part: Callable[[], None],
        has_gradient: bytes,
        has_written: Callable[[], bool] | None = None,
    ) -> None:
        """Update this rank's shard, and exchange what each rank has written. Collective.

        Call it within `updating`.

        Raises:
            Exception: What `part` raises. If no rank has written anything, the step was not made, the next
                one can be made, and `updating` lets the exception pass.
            ConfigError: The same, on a rank that has nothing to write in this step; quotes the other ranks.
            CollectiveError: Another rank has raised, or is lost.
        """
        before = self._pieces.own_versions()
        try:
            part()
        except Exception as error:
            is_written = self._pieces.own_versions() != before if has_written is None else has_written()
            outcome = _RAISED if is_written else _REFUSED
            if self._is_refused_by_all(error, outcome, has_gradient):
                self._refusal = error
            raise
        if self._travel is None:
            return
        written, is_idle = self._find_route(has_gradient)
        own = _IDLE if is_idle else _WRITTEN
        known = self._travel.spread(written, own)
        # With several hosts, each host's step table covers only its own ranks, and would not show that a rank
        # of another host has written nothing.
        if self._pieces.storages and not _is_half_made(known or b""):
            self._step_tables.end_part()
        outcomes = self._compare_outcomes(known, own)
        if _is_refusal(outcomes) or _is_half_made(outcomes):
            self._follow(outcomes)

    def _find_route(self, has_gradient: bytes) -> tuple[Any, bool]:
        assert self._travel is not None
        key = (self._pieces.generation, has_gradient)
        if self._route[0] != key:
            written = self._travel.prepare(self._pieces.written(has_gradient))
            self._route = key, (written, not self._pieces.has_part(has_gradient))
        found: tuple[Any, bool] = self._route[1]
        return found

    def _compare_outcomes(self, known: bytes | None, own: int) -> bytes:
        """The outcome of each rank; empty if outcomes are not exchanged. Collective.

        Afterwards no rank reads values that another rank has not written yet.
        """
        assert self._travel is not None
        if self._travel.compares_outcomes and (known is None or self._pieces.storages):
            return self._travel.outcomes(own)
        if self._pieces.storages:
            self._travel.barrier()
        return known or b""

    def _is_refused_by_all(self, error: Exception, outcome: int, has_gradient: bytes) -> bool:
        """True if no rank has written anything: each has raised too, or has nothing to write. Collective."""
        if self._travel is None:
            return outcome == _REFUSED
        if not self._travel.compares_outcomes:
            return False
        try:
            # Make the same calls as the ranks that have not raised.
            known = self._travel.spread(self._find_route(has_gradient)[0], outcome)
            outcomes = self._compare_outcomes(known, outcome)
            if not _is_refusal(outcomes):
                return False
            if self._pieces.storages:
                self._step_tables.end_part()  # there is nothing to write
            if _IDLE in outcomes:
                self.refuse(ConfigError(f"{type(error).__name__}: {error}"))
            elif self._pieces.storages:
                self._travel.barrier()  # no rank reads the step table before all have written to it
        except PacelineError:
            return False  # this rank's own error says more
        return True

    def _follow(self, outcomes: bytes) -> None:
        assert self._travel is not None and self._barriers is not None
        if not _is_refusal(outcomes):
            self._travel.barrier()  # raises the error that another rank has reported
            raise CollectiveError(f"{OWNER}.step: another rank has raised in its part.")
        try:
            self._barriers.sync(Call.STEP, 0, 0, lambda: Facts(Call.STEP))
        except ConfigError as error:
            self._refusal = error
            raise

    def check_unbroken(self) -> None:
        """Raise if a step was begun and not completed."""
        for storage in self._pieces.storages:
            storage.check_whole(OWNER)
        if self._failure is not None and len(self._own_parameters()) > 0:
            raise partial_step_error(OWNER, str(self._failure)) from self._failure
        if partial_steps.marks:
            partial_steps.check(OWNER, self._pieces.parameters)

    def _facts(self, call: Call, has_gradient: bytes) -> Facts:
        without = [name for name, has in zip(self._pieces.names, has_gradient) if not has]
        return Facts(call, self._spell(), without)

    def _hash_options(self) -> int:
        now = self._look()
        if now != self._seen[0]:
            self._seen = now, hash_options(self._spell())
        return self._seen[1]

    # --- the state of all ranks on one ---

    def consolidate(
        self,
        to: int,
        rank: int,
        world_size: int,
        gather: Callable[[int], State],
        in_reach: Callable[[], State | None] = lambda: None,
    ) -> None:
        """Gather the state of all ranks on one rank. Collective.

        Args:
            to: The rank that gets it.
            rank: This rank.
            world_size: Number of ranks.
            gather: Collects the state of all ranks on the rank that it is given. Collective.
            in_reach: Returns the whole state without other ranks, if a rank is lost; None: it can't.

        Raises:
            ConfigError: There is no such rank.
            MismatchError: Another rank makes a step instead.
        """
        to = Arguments(f"{OWNER}.consolidate_state_dict").whole("to", to, least=0, most=world_size - 1)
        self.check_unbroken()
        self._state = None
        if self._barriers is not None:
            call = Call.CONSOLIDATE
            try:
                self._barriers.sync(call, self._hash_options(), to, lambda: self._facts(call, b""))
            except PacelineError as error:
                state = in_reach() if is_loss(error) else None
                if state is None:
                    raise
                self._state = state
                return
        state = gather(to)
        if to == rank:
            self._state = state

    def consolidated(self, rank: int) -> State:
        if self._state is None:
            raise ConfigError(
                f"{OWNER}.state_dict: the state has not been consolidated on rank {rank}.",
                likely="only the rank that consolidate_state_dict(to=0) names has the whole state",
                hint=f"call consolidate_state_dict(to={rank}) on every rank before; or save this rank's "
                "part: optimizer.optim.state_dict()",
            )
        return self._state

    def begin_anew(self) -> None:
        """Forget earlier failures and the consolidated state, because another state was loaded.

        Parameters that hold half of a step still raise, until other parameters are loaded.
        """
        self._failure = self._state = None


def is_loss(error: BaseException | None) -> bool:
    """True if ranks did not reach a barrier, in contrast to reaching it for different calls."""
    return isinstance(error, (PeerLostError, DeadlineError, GroupClosedError, RendezvousError))


class explaining:
    """A context that adds to a group's errors in which step they occurred, and what that means."""

    # Not a generator: entering one takes longer than a barrier.
    def __init__(self, owner: str, consequence: str, **fields: object) -> None:
        self._owner, self._consequence, self._fields = owner, consequence, fields

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, CollectiveError) and not error.summary.startswith(self._owner):
            raise self.explained(error) from error

    def explained(self, error: CollectiveError) -> CollectiveError:
        where = ", ".join(filter(None, [f"{self._owner}.step; {self._consequence}", error.where]))
        rows = {row: getattr(error, row) for row in ("seen", "expected", "got", "likely", "hint")}
        fields = {**error.fields, **self._fields}
        return type(error)(error.summary, where=where, **rows, **fields)


def _explaining(*, has_begun: bool) -> explaining:
    return explaining(OWNER, HALF if has_begun else NOTHING_WRITTEN, step_is_complete=not has_begun)


def _is_refusal(outcomes: bytes) -> bool:
    return _REFUSED in outcomes and {*outcomes} <= {_REFUSED, _IDLE}


def _is_half_made(outcomes: bytes) -> bool:
    """True if some rank has raised, unless all ranks with a shard raised before they wrote anything."""
    return (_REFUSED in outcomes or _RAISED in outcomes) and not _is_refusal(outcomes)


class _Updating:
    # Not a generator: entering one takes longer than a barrier.
    def __init__(self, begin: Callable[[], None], end: Callable[[BaseException], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._end(error)
