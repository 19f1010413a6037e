"""One backward pass after the other, for every framework: what a front end adds are its hooks and tensors.

A pass begins when the front end calls `_arm`, at the first gradient of a backward, and ends in `_end`, when
that backward is over: this rank waits for the others, judges, and brings the means home.

A rank that runs out of data before the others takes part in their passes with no gradients and a weight of 0,
until every rank has none left; each rank says so in the status that ends a pass, so nobody asks. Then it gets
the model of the rank that went on longest, and its own gradients are again what they were.

Imports only what is in this folder, `errors`, the core and the standard library.
"""

from __future__ import annotations

import contextlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from paceline import _core
from paceline.errors import ConfigError, ForkedError
from paceline.reducer import farewell
from paceline.reducer.drift import DriftWatch
from paceline.reducer.end_of_backward import EndOfBackward
from paceline.reducer.micro_batches import MicroBatchWeights
from paceline.reducer.pass_errors import Judge, give_up_interrupted, names_by_rank, uneven_error
from paceline.reducer.protocol import Outcome, PassStatus, Reducer

_NOTES_DIFFER = int(Outcome.NOTES_DIFFER)  # as an enumeration's member it would cost more than the question

Fingerprint = Sequence[tuple[int, int]]
"""Identity and version counter of each gradient."""

Memory = tuple[list[int], list[int]]
"""Addresses and sizes in bytes."""


class PassOptions(Protocol):
    """What a wrapped model was asked to do, as far as passes need it."""

    @property
    def allow_unused(self) -> bool: ...
    @property
    def allow_nobodys(self) -> bool: ...
    @property
    def nonfinite(self) -> str: ...


class SyncedBuffers(Protocol):
    """The buffers of a model."""

    @property
    def is_needed(self) -> bool:
        """Whether the end of a pass brings any in step."""
        ...

    def sync(self, active: Sequence[int], *, on_demand: bool) -> None:
        """Bring them in step with the ranks that had data. Collective."""
        ...


class PassState:
    """Where one model is in its passes; hooks and the front end share it.

    Attributes:
        is_syncing: Whether the pass under way is averaged; no_sync() makes forward clear it.
        is_armed: Whether a pass is under way, so that the end of this backward ends it.
        is_interrupted: Whether an exception has ended the backward of the last pass, of which the other ranks
            do not know yet.
        handed: Gradients handed over in this pass, by parameter, in that order. Keeps the memory alive that
            the reducer reads and writes by pointer.
        staged: Those of them whose mean the front end copies back.
        accumulated: Parameters that got local gradients, in no_sync(), since the last synchronised pass.
        status: What the end of the pass tells all ranks: the forwards since the last one, and what is wrong.
            A hook that raised instead would leave the others waiting.
        refusal: Why the gradient of the parameter `status.refused` cannot be averaged.
        where: "rank 1 of 2", for errors.
    """

    __slots__ = (
        "accumulated",
        "arm",
        "handed",
        "is_armed",
        "is_interrupted",
        "is_syncing",
        "pid",
        "refusal",
        "staged",
        "status",
        "where",
    )

    def __init__(self, rank: int, world_size: int) -> None:
        self.where = f"rank {rank} of {world_size}"
        self.is_syncing = True
        self.is_armed = False
        self.is_interrupted = False
        self.handed = _core.HandedGradients()
        self.staged: list[int] = []
        self.accumulated: set[int] = set()
        self.status = PassStatus()
        self.refusal: ConfigError | None = None
        self.pid = os.getpid()
        self.arm: Callable[[], None]

    def begin_next(self) -> None:
        """Forget the pass that is over."""
        self.is_armed = self.is_interrupted = False
        self.handed.clear()
        self.staged.clear()
        self.accumulated.clear()
        self.status.begin_next()
        self.refusal = None

    def interrupt(self) -> None:
        """The backward has ended in an exception; whatever begins next tells the other ranks."""
        self.is_armed = False
        self.is_interrupted = True

    def refuse(self, index: int, error: ConfigError) -> None:
        """The gradient of a parameter cannot be averaged; raises at once where no pass will end.

        Raises:
            ConfigError: The one given.
        """
        if not self.is_syncing:
            raise error
        if self.refusal is None:
            self.status.refused, self.refusal = index, error

    def check_process(self) -> None:
        """Raise ForkedError in a forked child, which has the model but not the memory."""
        if os.getpid() != self.pid:
            raise ForkedError(
                "A model wrapped for data-parallel training was used in a forked child.",
                seen=f"wrapped in process {self.pid}, used in process {os.getpid()}",
                likely="a data loader's worker, or multiprocessing with the start method 'fork'",
                hint="use `.module` in the child; or start it with the method 'spawn' and wrap there",
            )


class FreshGradients:
    """Whether gradients are still what the last pass made them, so that its norm is theirs.

    A gradient that was replaced is another object, and one that was changed by its framework has another
    version; writes past the framework (through `.data`, numpy or a kernel) are seen in a few lines of memory
    of each gradient. Such a write that changes a few elements only may go unseen. The same lines on every
    rank, so that ranks with the same gradients find the same.

    Args:
        fingerprint: Of all gradients.
        memory: Where all gradients are; None: not all where the processor can read them, and then nobody
            knows.

    Attributes:
        is_used: Whether anybody has asked. Until then nothing is noted, and the answer is no.
    """

    def __init__(self, fingerprint: Callable[[], Fingerprint], memory: Callable[[], Memory | None]) -> None:
        self.is_used = False
        self._fingerprint = fingerprint
        self._memory = memory
        self._seen: Fingerprint | None = None
        self._sample: int | None = None

    def note(self) -> None:
        """A pass has just made them the means."""
        self._sample = self._take_sample()
        self._seen = None if self._sample is None else self._fingerprint()

    def forget(self) -> None:
        """A pass was void, or raised: what the gradients are now, nobody knows."""
        self._seen = None

    def are_unchanged(self) -> bool:
        """Whether nobody has changed a gradient since note(), as far as that is seen."""
        self.is_used = True
        return (
            self._seen is not None
            and self._seen == self._fingerprint()
            and self._sample == self._take_sample()
        )

    def _take_sample(self) -> int | None:
        memory = self._memory()
        return None if memory is None else _core.sample_all(*memory)


class BackwardPasses(ABC):
    """Averages the gradients of one model in each backward.

    Args:
        names: Of the trainable parameters, by index in the plan.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        state: Shared with the hooks.
        weights: Of this rank's micro-batches.
        buffers: Keeps them in step.
        weight: Of this rank in the pass under way, or the last one.
        gradients: Whether they are still those of the last pass.
        notes: What this rank does between two passes.
        drift: Whether the replicas are still the same, where there is a reason to look, or now and then.
        active: Ranks that had data in the last pass. Others shadow it.
        _tell: Lets the errors of other ranks tell what this one was doing; None: they can't.
        is_order_final: Whether the plan will not change any more.
        good_passes: How many passes have made the gradients means, and all else that a pass does.
        refuses_uneven: Whether a pass for which some ranks have no data raises, on all of them.
    """

    weights: MicroBatchWeights
    buffers: SyncedBuffers
    gradients: FreshGradients
    notes: _core.IterationNotes
    drift: DriftWatch
    is_order_final: bool
    _config: PassOptions
    _judge: Judge
    _tell: Callable[[str], None] | None

    def __init__(self, names: Sequence[str], rank: int, world_size: int) -> None:
        self.state = PassState(rank, world_size)
        self.state.arm = self._arm
        farewell.watch(self)
        self.world_size = world_size
        self.weight = 1.0
        self.active: Sequence[int] = range(world_size)
        self._all_ranks = range(world_size)
        self._names = names
        self._begun_forwards = 0
        self._waited_before_s = 0.0
        self._pass_number = 1
        self.good_passes = 0
        self.refuses_uneven = False
        self._of_first: tuple[float, list[tuple[int, int]]] | None = None
        self._gradients_aside: dict[int, Any] = {}
        self._accumulated_aside: set[int] = set()

    # --- what a front end adds ---

    @property
    @abstractmethod
    def reducer(self) -> Reducer:
        """That of the plan in use."""

    @property
    @abstractmethod
    def path(self) -> str:
        """Where gradients are averaged: "memory" or "group"."""

    @abstractmethod
    def broadcast_model(self, root: int) -> None:
        """Give every rank the parameters and buffers of the rank `root`. Collective."""

    @abstractmethod
    def _is_in_backward(self) -> bool:
        """Whether this thread runs a backward: a forward within it is a recomputation."""

    @abstractmethod
    def _call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the backward that runs is over."""

    @abstractmethod
    def _has_gradient(self, index: int) -> bool:
        """Whether the parameter has a gradient."""

    @abstractmethod
    def _hand_over(self, index: int) -> None:
        """Give the parameter's gradient to the reducer."""

    @abstractmethod
    def _bring_home(self) -> None:
        """Make every parameter's gradient the mean, where the reducer has not done so itself."""

    @abstractmethod
    def _clear_place(self, index: int) -> None:
        """Fill the parameter's place in the arena with zeros."""

    @abstractmethod
    def _adopt_order(self, order: list[int]) -> None:
        """Plan anew, in the order that rank 0 saw; once, after the first good pass. Collective."""

    @abstractmethod
    def _sync_others(self) -> None:
        """Bring in step, after a pass, what the reducer does not average: buffers. Collective."""

    def _gradients_to_keep(self) -> dict[int, Any]:
        """This rank's gradients, by parameter, where no pass changes them."""
        return {}

    def _set_gradients(self, gradients: dict[int, Any]) -> None:  # noqa: B027
        """Make these, of `_gradients_to_keep`, the only gradients that parameters have."""

    def _prepare_end(self) -> None:  # noqa: B027  # most need nothing
        """At the end of backward, before this rank says that it is there."""

    def _forget_interrupted(self) -> None:  # noqa: B027
        """Drop what a front end remembers of a pass that an exception broke off."""

    # --- what all front ends do ---

    @property
    def who(self) -> str:
        """This rank in words."""
        return self.state.where

    def waiting_ranks(self) -> list[int]:
        """Ranks that wait at the end of a pass that this rank has not ended, if that is known."""
        is_own_process = os.getpid() == self.state.pid
        return self.reducer.waiting_ranks() if is_own_process else []

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent waiting for the others at the end of backward, in all passes."""
        return self._waited_before_s + self.reducer.waited_s

    def squared_norm(self) -> float:
        """Of the last pass's mean gradient; NaN if that pass was void, or raised."""
        return self.reducer.squared_norm() if self._of_first is None else self._of_first[0]

    def known_norm(self) -> float | None:
        """The 2-norm of all gradients, if it is that of the last pass's means."""
        if not self.gradients.are_unchanged() or self._unused_by_all():
            return None
        norm = math.sqrt(self.squared_norm())
        return None if math.isnan(norm) else norm  # of a void pass, too

    @property
    def looks_for_nonfinite(self) -> bool:
        """Whether anybody looks at the gradients: in memory that costs nothing."""
        return self.path == "memory" or self._config.nonfinite != "ignore"

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Names of parameters whose gradient was not finite in the last pass, by rank."""
        pairs = self.reducer.nonfinite() if self._of_first is None else self._of_first[1]
        return names_by_rank(pairs, self._names)

    def begin_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """Note a forward whose gradients will be needed.

        Raises:
            ForkedError: This process is a forked child of the one that wrapped the model.
            SkippedPassError: The last backward ended in an exception, on this rank.
        """
        state = self.state
        state.check_process()
        has_weights = self.weights.is_used
        if (state.is_armed or state.is_interrupted or has_weights) and not self._is_in_backward():
            self._tell_if_interrupted()
            if has_weights:
                self.weights.give_up_interrupted()
        self._begun_forwards += 1
        state.is_syncing = is_syncing
        if self._tell is not None:
            self._tell(f"in forward of pass {self._pass_number}")
        # Forwards in eval mode often have no backward, on some ranks only; such a rank skips nothing.
        if is_syncing and is_training:
            state.status.forwards += 1

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Within it, backwards do not synchronise, whatever their forward was to do.

        Nor does a later backward of a forward that ran within it.
        """
        before, begun_before = self.state.is_syncing, self._begun_forwards
        self.state.is_syncing = False
        try:
            yield
        finally:
            if self._begun_forwards == begun_before:
                self.state.is_syncing = before

    def take_part_until_all_finished(self, after_pass: Callable[[], object] | None) -> None:
        """Shadow the others' passes, then take over the model of those who went on longest. Collective."""
        self._take_part(after_pass, weight=0.0, keep_accumulated=False)

    @contextlib.contextmanager
    def joining(self, *, divide_by_all: bool, throws: bool) -> Iterator[None]:
        """Within it, ranks may make different numbers of passes. Its end is collective.

        Args:
            divide_by_all: Ranks without data count in the mean, with zeros.
            throws: All ranks raise at the end of the first pass for which one had no data.
        """
        before, self.refuses_uneven = self.refuses_uneven, throws
        try:
            yield
            self._take_part(None, weight=1.0 if divide_by_all else 0.0, keep_accumulated=True)
        finally:
            self.refuses_uneven = before

    def _take_part(
        self, after_pass: Callable[[], object] | None, *, weight: float, keep_accumulated: bool
    ) -> None:
        last_active = self.active
        self.begin_shadowing(keep_accumulated=keep_accumulated)
        try:
            while self.shadow(weight=weight):
                last_active = self.active
                if after_pass is not None:
                    after_pass()
        finally:
            self.end_shadowing()
        if 0 < len(last_active) < self.world_size:  # 0: all have finished before, and made no pass since
            self.broadcast_model(last_active[0])

    def begin_shadowing(self, *, keep_accumulated: bool) -> None:
        """Put this rank's gradients aside: from here to `end_shadowing` it has those of the others.

        Args:
            keep_accumulated: Give back what no_sync() has accumulated too; else it is dropped.
        """
        state = self.state
        self._gradients_aside = self._gradients_to_keep()
        self._accumulated_aside = set(state.accumulated)
        if not keep_accumulated:
            for index in self._accumulated_aside:
                self._gradients_aside.pop(index, None)
            self._accumulated_aside.clear()
        self._set_gradients({})

    def end_shadowing(self) -> None:
        """Give this rank its own gradients back: the next backward adds to them."""
        gradients, self._gradients_aside = self._gradients_aside, {}
        self._set_gradients(gradients)
        self.state.accumulated |= self._accumulated_aside

    def shadow(self, *, weight: float) -> bool:
        """Take part in a pass of the others without gradients; within `begin_shadowing`. Collective.

        The rank gets the means as its gradients as well, for those who step along.

        Returns:
            Whether any rank had data.
        """
        self.state.check_process()
        self._tell_if_interrupted()
        self._set_gradients({})  # those of the last such pass
        self.weight = weight
        self.reducer.set_weight(weight)
        if not self._config.allow_unused:  # nothing is unused because this rank has no data
            for index in range(len(self._names)):
                self._clear_place(index)
                self.reducer.mark_ready(index, 0)
        self.state.status.finished = True
        try:
            self._end()
        finally:  # what it raises may be caught, and training go on
            self.weight = 1.0
            self.reducer.set_weight(1.0)
        return bool(self.active)

    def _arm(self) -> None:
        """The first gradient of a backward has come.

        Raises:
            SkippedPassError: The backward before this one ended in an exception, on this rank.
        """
        state = self.state
        state.check_process()
        if state.is_interrupted:
            self._give_up_interrupted()
        if self.weights.is_used:
            self.weight = self.weights.begin()
            self.reducer.set_weight(self.weight)
        state.is_armed = True  # first: gradients on another device come from another thread
        self._call_at_end(EndOfBackward(self._end_backward, state.interrupt))
        if self._tell is not None:
            self._tell(f"in backward of pass {self._pass_number}")

    def _end_backward(self) -> None:
        try:
            self._end()
        finally:
            if self.state.is_armed:  # it raised before the pass was ended
                self.state.interrupt()

    def _end(self) -> None:
        """The end of this rank's backward: wait for the others, judge, and bring the means home.

        Between two large computations little of this is in the processor's caches: each call of a function
        in Python costs a small model about a microsecond.
        """
        state, reducer, config = self.state, self.reducer, self._config
        self._of_first = None
        self.gradients.forget()
        self._prepare_end()
        try:
            self._hand_over_rest()
            status = state.status
            reducer.set_note(self.notes.take(self._begun_forwards, bool(state.accumulated)))
            allow_unused = config.allow_unused or status.frozen is not None
            outcome = reducer.finish(status, allow_unused, config.allow_nobodys)
            self.active = self._all_ranks
            if outcome:
                self._note_active(Outcome(outcome))
                self._judge.judge(Outcome(outcome), reducer, state.refusal)
            order = None if self.is_order_final else list(state.handed)
            if self.active:
                if overlapping := reducer.overlapping():
                    self._part_overlapping(overlapping)
                self._bring_home()
            if self.gradients.is_used:
                self.gradients.note()
        finally:
            state.begin_next()
            self.weights.end()
            if self._tell is not None:
                self._tell(f"after backward of pass {self._pass_number}")
            self._pass_number += 1
        if order is not None:
            self._adopt_order(order)
        if self.active:
            self._sync_others()
        self.good_passes += 1
        # Where a rank has no data there may be ranks that make no step until the others have finished.
        if len(self.active) == self.world_size:
            self.drift.end_pass(reducer.notes_by_rank if outcome & _NOTES_DIFFER else None)
            self.notes.begin(self._begun_forwards)

    def _part_overlapping(self, overlapping: Sequence[int]) -> None:
        """Where gradients share memory, bring their means home into memory of their own.

        As for parameters that this backward left without a gradient.
        """
        state = self.state
        for index in overlapping:
            state.handed.discard(index)
            if index in state.staged:
                state.staged.remove(index)

    def _unused_by_all(self) -> list[int]:
        """Parameters that no rank with data used in the last pass."""
        if len(self.active) in (0, self.world_size):
            return self.reducer.globally_unused()
        # Ranks without data have marked all parameters, where unused ones are not allowed.
        return sorted(set.intersection(*(set(self.reducer.unused(rank)) for rank in self.active)))

    def _note_active(self, outcome: Outcome) -> None:
        if Outcome.FINISHED in outcome:
            statuses = self.reducer.statuses()
            self.active = [rank for rank, status in enumerate(statuses) if not status.finished]
            if self.refuses_uneven and self.active:
                raise uneven_error(statuses)

    def _hand_over_rest(self) -> None:
        if len(self.state.handed) < len(self._names) and not self.state.status.finished:
            self._hand_over_accumulated()

    def _hand_over_accumulated(self) -> None:
        """Hand over gradients that this backward did not touch but that count all the same.

        Those of no_sync() passes; and, where unused parameters are allowed, any gradient that is left
        from before: the others add to theirs, so it must take part in the mean.
        """
        state = self.state
        for index in range(len(self._names)):
            counts = index in state.accumulated or self._config.allow_unused
            if index not in state.handed and counts and self._has_gradient(index):
                self._hand_over(index)

    def _tell_if_interrupted(self) -> None:
        if self.state.is_armed or self.state.is_interrupted:
            self._give_up_interrupted()

    def _give_up_interrupted(self) -> None:
        """End the pass that an exception broke off, so that all ranks learn of it and can go on."""
        self._forget_interrupted()
        error = give_up_interrupted(self.reducer, self._config.allow_unused, self._config.allow_nobodys)
        self.state.begin_next()
        self.weights.end()
        if error is not None:
            raise error
