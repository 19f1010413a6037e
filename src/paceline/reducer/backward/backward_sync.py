"""The state machine of averaged backward passes, for any framework.

`BackwardSync` begins and ends each backward, checks its outcome on all ranks, and copies the means back. It
also ends a backward that an exception interrupted. A framework provides a `FrontEnd`. `CurrentPlan` decides
where gradients are averaged, `RemainingGradients` handles gradients that no hook handed over, and
`BackwardStatistics` and `BackwardLog` keep figures. `BackwardSync._end` is the whole end of a backward.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, final

from paceline.errors import CollectiveError, ConfigError, MismatchError, PacelineError, ReplicaError
from paceline.health import exit_reports
from paceline.health.peer_errors import activity_of
from paceline.health.stop_signals import stop_signals
from paceline.reducer.backward import end_progress as stages
from paceline.reducer.backward.backward_log import BackwardLog, LocalBackward
from paceline.reducer.backward.current_plan import CurrentPlan
from paceline.reducer.backward.end_progress import EndProgress
from paceline.reducer.backward.front_end_interface import AnyAutograd, BackwardOptions, FrontEnd
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.backward.remaining_gradients import RemainingGradients
from paceline.reducer.backward.replica_drift import DriftWatch
from paceline.reducer.backward.same_inputs import SameInputs
from paceline.reducer.backward.state import (
    ENDING,
    IDLE,
    INTERRUPTED,
    OPEN,
    RUNNING,
    BackwardState,
    EndOfBackward,
    Graphs,
)
from paceline.reducer.backward.static_graph import GraphVariety, StaticGraph
from paceline.reducer.backward.statistics import BackwardStatistics
from paceline.reducer.backward_errors import Judge, exit_warning, shorten, uneven_error
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import Communicator
from paceline.reducer.owners import agreed_owners, globally_unused, needs_memory, owners, several_models
from paceline.reducer.reducer_interface import BackwardResult, BackwardStatus, Outcome, Reducer
from paceline.reducer.replica_hashes import Entry
from paceline.trace.recording import recording
from paceline.trace.records import Event

_log = logging.getLogger("paceline")
_NOT_FINITE = int(Outcome.NONFINITE | Outcome.OVERFLOWED)
_REPORTED, _FINISHED = int(Outcome.REPORTED), int(Outcome.FINISHED)
_NOTES_DIFFER = int(Outcome.NOTES_DIFFER)  # an int, because testing an enumeration's member is slower
_WROTE_BACK, _SYNCED_BUFFERS = int(Event.WROTE_BACK), int(Event.SYNCED_BUFFERS)
_BACKWARD_ENDED = int(Event.AVERAGING_ENDED)
_MOST_INTERRUPTIONS = 100  # of one end of a backward, since a timer may raise again and again
_MOST_TRIES = 5  # of one stage that raises each time


@final
class BackwardSync(Generic[AnyAutograd]):
    """Averages the gradients of one model in each backward.

    Attributes:
        current_plan: The plan in use: where gradients are averaged, and over which communicator.
        statistics: Figures of the backward passes so far.
        graphs: The graphs of forwards whose backward is still to come.
        shares_parameters: Whether the ranks of each host share one copy of the parameters.
        drift: Checks that the replicas are still equal, periodically or when there is a reason.
        active: Ranks that had data in the last backward. The others shadow it; see `uneven_inputs`.
        good_backwards: How many backward passes ended without an error. A backward for which no rank had data
            averages nothing and is not counted.
        among: A description of these ranks for errors, if other ranks of the job number them differently;
            else empty.
        member: A description of this rank's replica group, if replicas of other groups differ on purpose;
            else empty.
        after_good: Called with this rank's weight after each good backward for which some rank had data.
        refuses_uneven: Whether a backward for which some ranks have no data raises, on all of them.
        is_stopping: Whether some rank had received a stop signal by the end of a backward. All ranks learn it
            after the same backward.
        averages_sums: Whether only `average_sums` averages, and a backward of autograd raises.
    """

    def __init__(
        self,
        front_end: FrontEnd[AnyAutograd],
        state: BackwardState,
        communicator: Communicator[Any],
        config: BackwardOptions,
    ) -> None:
        if config.scatters and communicator.path != "memory":
            raise needs_memory(communicator.path)
        tensors = front_end.tensors
        self.state = state
        self.state.arm, self.state.give_up = self._arm, self._give_up_interrupted
        exit_reports.before_leaving(self._warn_at_exit)
        self.gradients, self.sparse = front_end.gradients, front_end.sparse
        self._has_sparse = len(self.sparse.indices) > 0
        self._packed: Sequence[Any] = ()  # the sparse gradients of the micro-batches of a step
        self.autograd, self.watch = front_end.autograd, front_end.autograd.watch
        self.micro_batches, self.buffers, self.notes = (
            front_end.micro_batches,
            front_end.buffers,
            front_end.notes,
        )
        self.buffers.watch()
        self.world_size = communicator.world_size
        self.active: Sequence[int] = range(communicator.world_size)
        self._all_ranks = range(communicator.world_size)
        self._tensors = tensors
        self._names = tensors.names
        self._set_activity = communicator.publish
        self._begun_forwards = 0
        self.statistics = BackwardStatistics(
            front_end, communicator, asks_for_nonfinite=config.nonfinite != "ignore"
        )
        self._fresh = self.statistics.fresh
        self._log = BackwardLog(
            communicator.rank, communicator.world_size, tensors.names, self.statistics.times
        )
        self._backward_id = self._log.before_first + 1
        self.good_backwards = 0
        self.among = self.member = ""
        self.after_good: Callable[[float], None] | None = None
        self.refuses_uneven = self.is_stopping = self.averages_sums = False
        self.shares_parameters = False
        self.drift = DriftWatch(config.check_replicas_every, self._hash_replica, communicator.all_gather)
        self._same_inputs = SameInputs(front_end.ops) if communicator.world_size > 1 else None
        self._variety = GraphVariety(len(tensors.names) - len(tensors.delayed))
        self.graphs = state.graphs = Graphs(self.close)
        self._scatters = config.scatters and communicator.world_size > 1
        self._is_obstructed = self._scatters
        self.current_plan = CurrentPlan(
            front_end, communicator, config, self.statistics, self._log.record_plan
        )
        self._front_end = front_end
        self._set_config(config)
        self._shared: set[int] = set()
        self._is_complete = False
        self._is_lost = False  # a backward raised an error that ends the group on every rank
        self._end_progress: EndProgress | None = None
        self._armed = 0  # how many backward passes were armed or given up
        self._backward = 0
        registry.join(self)
        self.refresh_sharing()
        self.autograd.install()
        if self._scatters:
            owners.follow(self._follow_owners)
            self._follow_owners()

    def use_config(self, config: BackwardOptions) -> None:
        """Use other options for the coming backward passes. Call it on every rank; not within a backward."""
        self._set_config(config)
        self.autograd.use_static_graph(config.static_graph)

    def _set_config(self, config: BackwardOptions) -> None:
        self._config = config
        all_gather = self.communicator.all_gather
        self._static_graph = StaticGraph(self._names, all_gather) if config.static_graph else None
        self._judge = Judge(
            self._tensors.all_names,
            self.world_size,
            allow_unused=config.allow_unused,
            nonfinite=config.nonfinite,
            check_graph=None if self._static_graph is None else self._static_graph.check,
            all_gather=all_gather,
        )
        self._remaining = RemainingGradients(
            self._front_end, self.state, self._variety, self._static_graph, allow_unused=config.allow_unused
        )

    def close(self) -> None:
        """Stop averaging. The gradient buffer is freed with the last gradient that lies in it."""
        registry.leave(self)
        self._log.close()
        self.autograd.close()

    def end(self) -> None:
        """Stop averaging; gradients keep their values and move to memory of their own."""
        self.close()
        self.end_turn()
        self.settle_interrupted()
        self.gradients.leave_buffer()
        self.reducer.close()

    def end_turn(self) -> None:
        """Let other models over the same process group make their calls; this backward makes no more."""
        if (order := self.current_plan.reduction.order) is not None:
            order.end(self)

    # --- queries ---

    @property
    def who(self) -> str:
        return self.state.where

    @property
    def reducer(self) -> Reducer:
        return self.current_plan.reduction.reducer

    @property
    def communicator(self) -> Communicator[Any]:
        return self.current_plan.communicator

    @property
    def asked_timeout_s(self) -> float | None:
        return self._config.timeout_s

    @property
    def trainable(self) -> Sequence[object]:
        return self._tensors.all_trainable

    @property
    def names(self) -> Sequence[str]:
        return self._tensors.all_names

    @property
    def is_shared(self) -> bool:
        return bool(self._shared)

    @property
    def is_graph_static(self) -> bool:
        return self._static_graph is not None or self._variety.is_static(self.good_backwards)

    def _warn_at_exit(self) -> None:
        """Warn at exit if other ranks still wait for this one.

        Nothing else reveals that a rank skipped a whole iteration, because its later calls are those that
        every rank makes. After an error that ended the group no warning is given: the other ranks may look as
        if they waited, but they are in the backward in which this rank raised.
        """
        # Without `current_plan` the constructor raised.
        is_made = hasattr(self, "current_plan") and not self._is_lost
        waiting = self.reducer.waiting_ranks() if is_made and os.getpid() == self.state.pid else []
        if waiting:
            _log.warning("paceline: %s", exit_warning(self.who, waiting, self.among))

    def broadcast_model(self, root: int) -> None:
        """Broadcast the parameters and buffers of the rank `root`. Collective.

        Parameters that the ranks of a host share are skipped: all ranks have made the last step together.
        """
        parameters = [] if self.shares_parameters else self._tensors.all_parameters.values()
        self.communicator.broadcast(list(parameters), root)
        self.buffers.take_over(root)

    def _hash_replica(self, optimizer: Any) -> Sequence[Entry]:
        now, in_step = self._tensors.current_buffers(), self.buffers.in_step
        buffers = {name: buffer for name, buffer in now.items() if name in in_step}
        return self._front_end.ops.hash_model(self._tensors.all_parameters, buffers, optimizer)

    # --- hooks, other models, owners ---

    def use_hook(self, hook: CommHook, process_group: Any) -> None:
        self.current_plan.use_hook(hook, process_group)
        self._set_activity = self.communicator.publish

    def refresh_sharing(self) -> None:
        self._sharing_version = registry.version
        before, self._shared = self._shared, registry.shared_by_others(self)
        if self._shared != before:
            self.gradients.share(self._shared)
            self.autograd.share(self._shared)
            self.micro_batches.shared = self._shared
            self._is_obstructed = self._scatters and (bool(self._shared) or not self.current_plan.owned)

    def _follow_owners(self, changed: set[int] | None = None) -> None:
        """From now on, send each mean only to the ranks that own it, once all parameters are owned.
        Collective.
        """
        if changed is not None and changed.isdisjoint(map(id, self.trainable)):
            return
        known = [owners.of(parameter) for parameter in self.trainable]
        owned_parts = [each for each in known if each is not None]
        if len(owned_parts) < len(known):
            return
        self._give_up_last()
        communicator = self.communicator
        owned = agreed_owners(owned_parts, communicator.rank, self.world_size, communicator.all_gather)
        self._is_obstructed = bool(self._shared)
        self.current_plan.use_owners(owned)

    def _check_scattering(self, *, is_training: bool) -> None:
        if self._shared:
            raise several_models(shorten([self._names[index] for index in sorted(self._shared)]), self.who)
        without = [n for n, p in zip(self._tensors.all_names, self.trainable) if owners.of(p) is None]
        if without and is_training:  # in evaluation nothing is scattered
            raise globally_unused(shorten(without), self.who)

    # --- recording ---

    def end_forward(self) -> None:
        self._log.records.end_forward(self._backward_id)

    def watch_local(self, output: object) -> None:
        """Record the backward of a forward in no_sync(); called only while everything is recorded."""
        backward = LocalBackward(self._backward_id)
        self.autograd.watch_local(output, backward)

    # --- the beginning of a backward ---

    def begin_forward(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_syncing: bool,
        is_training: bool,
        weight: float | None = None,
    ) -> None:
        """Note a forward whose gradients will be averaged or accumulated.

        Raises:
            ForkedError: This process is a forked child of the one that wrapped the model.
            ConfigError: The last backward was not finalized.
            CollectiveError: The last backward ended in an exception here, and a rank has been lost since.
        """
        state, autograd = self.state, self.autograd
        state.check_process()
        in_backward = autograd.is_in_backward()
        if self._sharing_version != registry.version and not in_backward:
            self.refresh_sharing()
        has_weights = self.micro_batches.is_used
        if (state.phase is not IDLE or has_weights) and not in_backward:
            self._give_up_last()
            if has_weights:
                if self.micro_batches.awaits_end:  # the end of a backward in no_sync()
                    autograd.await_drop(lambda: not self.micro_batches.awaits_end)
                self.micro_batches.give_up_interrupted()
        if has_weights or weight is not None:
            self.micro_batches.begin_forward(weight)
        if self._is_obstructed and is_syncing:
            self._check_scattering(is_training=is_training)
        self._begun_forwards += 1
        self.publish_forward(is_syncing=is_syncing, is_training=is_training)
        state.begin_forward(is_syncing, is_training=is_training, in_backward=in_backward)
        if recording.note is not None:
            self._log.records.begin_forward(self._backward_id, is_syncing, is_training, inputs, kwargs)
        if not in_backward:
            if self._same_inputs is not None and is_training:
                self._same_inputs.begin_forward(inputs, kwargs)
            self.buffers.begin_forward(
                is_trained=True, is_training=is_training, after_local_backward=bool(state.accumulated)
            )
        autograd.begin_forward(is_syncing=is_syncing, good_backwards=self.good_backwards)

    def begin_untrained_forward(self) -> None:
        if not self.autograd.is_in_backward():
            self.buffers.begin_forward(is_trained=False, is_training=False, after_local_backward=False)

    def publish_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """Publish that this rank begins a forward, for other ranks' error messages."""
        if self._set_activity is None:
            return
        number = self.state.status.forwards + (is_syncing and is_training)
        which = f"{number} " if number > 1 else ""
        self._set_activity(
            f"in forward {which}of iteration {self._backward_id - self._log.before_first}", number
        )

    def publish_error(self, error: PacelineError) -> None:
        """Publish the error that keeps this rank from continuing, for other ranks' error messages."""
        # A rank that lost a peer keeps its published activity, which is evidence for the others' errors.
        if self._set_activity is not None and not isinstance(error, CollectiveError):
            self._set_activity(activity_of(error))

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """In this context, backward passes do not synchronise, even those of forwards outside of it.

        Nor does a later backward of a forward in this context.
        """
        state = self.state
        was_local, was_forced, before = state.is_local, state.is_forced, bool(state.is_syncing)
        begun_before = self._begun_forwards
        state.expect(False)
        state.is_local = True
        try:
            yield
        finally:
            state.is_local = was_local
            is_empty = self._begun_forwards == begun_before
            if is_empty or state.is_due:
                state.expect(before or state.is_due, is_forced=was_forced and is_empty)

    def expect_backward(self, *, is_syncing: bool) -> None:
        """Make the backward of the forwards so far synchronise or not, whatever those forwards requested.

        Call this outside of no_sync() and of a backward. A later forward replaces this choice by its own.
        """
        state = self.state
        if not state.is_local and state.phase < RUNNING:
            state.expect(is_syncing, is_forced=True)

    def sync_next_backward(self, is_syncing: bool = True) -> None:
        state = self.state
        state.expect(is_syncing, is_forced=True)
        state.is_forward_averaged, state.is_forward_counted = is_syncing, False
        self.micro_batches.of_forward = None

    def _arm(self) -> None:
        """Begin a backward; called at its first gradient."""
        state = self.state
        try:
            if self.averages_sums:
                raise _outside_steps(self.who)
            state.check_process()
            if state.phase is INTERRUPTED:
                self._give_up_interrupted()
            self.autograd.prepare()
            if (order := self.current_plan.reduction.order) is not None:
                order.begin(self)
            if self.micro_batches.is_used:
                self._weigh(self.micro_batches.begin())
            if self._shared:
                self._backward = self.autograd.backward()
            state.phase = RUNNING  # first, because gradients on another device come from another thread
            self._armed += 1
            end = functools.partial(self._end_backward, self._armed)
            interrupted = functools.partial(self._interrupt_if_current, self._armed)
            self.autograd.at_end(EndOfBackward(end, interrupted))
            if self._set_activity is not None:
                forwards = state.status.forwards
                self._set_activity(
                    f"in backward of iteration {self._backward_id - self._log.before_first}", forwards
                )
            if recording.note is not None:
                self._log.records.begin_backward(self._backward_id)
        except BaseException as error:
            if state.phase is RUNNING:  # no call at its end will come any more
                self._interrupt()
            elif state.phase is not INTERRUPTED:
                self.end_turn()
            state.unfollow()
            if isinstance(error, PacelineError):
                self.autograd.note_error(error)
            raise

    def _weigh(self, weight: float) -> None:
        self.state.rank_weight = weight
        self.reducer.set_weight(weight)

    # --- the end of a backward ---

    def _end_backward(self, armed: int) -> None:
        if armed != self._armed:  # it was given up
            return
        if self.state.ends_by_hand:
            self.state.phase = OPEN
        else:
            self._end_now()

    def use_ends_by_hand(self, is_by_hand: bool) -> None:
        """Set whether the coming backward passes end only when `end_by_hand` is called."""
        if self.state.phase >= RUNNING and is_by_hand != self.state.ends_by_hand:
            raise ConfigError(
                "How a backward ends cannot be changed while one is under way.",
                where=self.who,
                hint="set require_manual_backward_finalization before forward, or after finalize_backward()",
            )
        self.state.ends_by_hand = is_by_hand

    def end_by_hand(self) -> None:
        """End the backward that was left open. Does and raises what the end of a backward does otherwise."""
        if self.state.phase is not OPEN:
            is_running = self.state.phase >= RUNNING
            raise ConfigError(
                "finalize_backward(): there is no backward to finalize.",
                where=self.who,
                seen="a backward is running" if is_running else "no synchronised backward since the last one",
                likely="it was called twice; or within a hook; or the backward ran in no_sync()",
                hint="call it once after each synchronised backward has returned",
            )
        self._end_now()

    def _end_now(self) -> None:
        state, number, has_raised = self.state, self._backward_id, True
        try:
            state.phase = ENDING
            if self.micro_batches.is_used and recording.note is not None:
                totals = self._log.totals
                totals.weight = (totals.weight or 0.0) + state.rank_weight
            self._end()
            has_raised = False
        except BaseException as error:
            recording.note_failure(error)
            raise
        finally:
            if recording.note is not None:
                now_ns = self._log.records.end_backward(number, has_raised)
                if now_ns >= recording.next_sample_ns:
                    # Gradients outside of shared memory would need a computation for their norm.
                    is_known = not has_raised and self.communicator.path == "memory"
                    self._log.sample(now_ns, number, self.statistics.squared_norm if is_known else None)
            if state.phase is ENDING:  # it raised before the backward was ended
                self._interrupt()

    def _interrupt_if_current(self, armed: int) -> None:
        """The framework dropped the end of a backward, possibly after that backward was given up."""
        if armed == self._armed and self.state.phase >= RUNNING:
            self._interrupt()

    def _interrupt(self) -> None:
        """Mark the backward as interrupted by an exception, which propagates to the user.

        The user may catch it, clear gradients and continue. Until all ranks have ended this backward, they
        may still reduce the gradients that this rank has handed over.
        """
        self._is_complete = False
        self.state.phase = INTERRUPTED  # the next forward or backward gives it up, and the other ranks raise
        if (note := recording.note) is not None:
            note(_BACKWARD_ENDED, self._backward_id, 1)
        self.gradients.interrupt()

    def _end(self) -> None:
        """Wait for the other ranks, check the outcome, and copy the means back."""
        state, current_plan, config = self.state, self.current_plan, self._config
        reducer, number = current_plan.reduction.reducer, self._backward_id
        statistics = self.statistics
        statistics.result = statistics.earlier_norm = None
        if self._fresh.is_used:
            self._fresh.forget()
        before = reducer.last
        self._end_progress = None
        try:
            self.autograd.raise_kept()
            status = state.status
            if status.finished:  # this rank has no data
                self._remaining.hand_over_nothing(reducer)
            elif self._shared:
                registry.complete_all(self._backward)
            else:
                self._remaining.hand_over(reducer)
            status.reached = self.graphs.reached
            if self.micro_batches.is_used:
                self.micro_batches.check_forwards()
            if self.micro_batches.unweighed is not None:
                state.report_unweighed(len(self._tensors.all_names))
            if self.buffers.has_writes:
                status.wrote_buffers = True
            if stop_signals.received:
                status.stops = True
            if self._same_inputs is not None:
                status.inputs = self._same_inputs.report()
            reducer.set_note(self.notes.take(self._begun_forwards, bool(state.accumulated)), number)
            allow_unused = config.allow_unused or status.frozen is not None
            if (order := current_plan.reduction.order) is not None:
                order.give_up_before(self)
            result = reducer.finish(status, allow_unused, config.allow_globally_unused)
            self._end_progress = EndProgress(number, self.good_backwards, self.drift.backwards, result)
            self._conclude(self._end_progress)
        except PacelineError as error:
            is_lost = isinstance(error, CollectiveError)
            progress = self._end_progress
            if progress is not None or is_lost:
                if progress is None or progress.stage <= stages.CLOSE:
                    self._adopt_errors(is_good=False)
                # A rank that lost a peer keeps its published activity, as evidence for the others' errors.
                self._close(number, is_published=not is_lost)
            self._fail(error)
            raise
        except BaseException as error:
            # For example of a signal handler. If the ranks have no outcome yet, the backward is interrupted.
            if self._end_progress is None and (last := reducer.last) is not None and last is not before:
                self._end_progress = EndProgress(number, self.good_backwards, self.drift.backwards, last)
            if self._end_progress is not None:
                self._conclude_after(error, self._end_progress)
            raise
        finally:
            self._end_progress = None
            self.autograd.forget()
            self.graphs.end_backward()

    def _conclude(self, progress: EndProgress) -> None:
        """Check the outcome that all ranks know now, copy the means back, and prepare the next backward.

        The other ranks continue, so this rank must complete this too, even if a signal handler raises in the
        middle. When called again, it resumes at `progress.stage`. Repeating most stages is harmless. Those
        that must not be repeated, because they call all ranks or the user's code, are marked as under way.
        """
        state, current_plan, result, number = self.state, self.current_plan, progress.result, progress.number
        outcome = result.outcome
        self.statistics.result = result
        if progress.stage == stages.JUDGE:
            self.active = self._all_ranks
            if outcome:
                self._log.note_nonfinite(number, result)
                self._note_active(result)
                self._judge.judge(result, state.refusal, self.micro_batches.unweighed)
                if outcome & (_REPORTED | _FINISHED) and any(each.stops for each in result.statuses):
                    self.is_stopping = True
                if outcome & _REPORTED and any(each.wrote_buffers for each in result.statuses):
                    progress.stage = stages.IN_WRITES
                    where = f"the end of backward {number - self._log.before_first}"
                    self.buffers.check_writes(self.active, where)
            progress.stage = stages.MEANS
        if progress.stage == stages.MEANS:
            progress.seen_order = None if current_plan.is_order_final else list(state.handed)
            if self.active:
                self._write_back_means(result)
            if recording.keeps_all and (note := recording.note) is not None:
                note(_WROTE_BACK, number, 0)
            if self.active and self._has_sparse:
                progress.stage = stages.IN_SPARSE
                has_data = not state.status.finished
                self.sparse.average(self._packed or [self.sparse.pack(state.rank_weight, has_data=has_data)])
                self._judge.judge_nonfinite(self.sparse.nonfinite)
            progress.stage = stages.STEPS
        if progress.stage == stages.STEPS:
            if self.active:
                progress.stage = stages.IN_STEPS
                self.autograd.after_means()
            progress.stage = stages.CLOSE
        if progress.stage == stages.CLOSE:
            if self._fresh.is_used:
                self._fresh.note()
            progress.stage = stages.IN_ADOPTION
            self._adopt_errors(is_good=bool(self.active) and not outcome & _NOT_FINITE)
            progress.stage = stages.NEXT
        if progress.stage == stages.NEXT:
            self._close(number)
            progress.stage = stages.ORDER
        if progress.stage == stages.ORDER:
            if progress.seen_order is not None:
                progress.stage = stages.IN_ORDER
                current_plan.adopt_order(progress.seen_order)
            progress.stage = stages.BUFFERS
        if progress.stage == stages.BUFFERS:
            if self.active:
                if self.buffers.hook is not None:
                    progress.stage = stages.IN_HOOK
                elif self.buffers.is_needed:
                    progress.stage = stages.IN_BUFFERS
            self.buffers.end_backward(self.active)
            if recording.keeps_all and (note := recording.note) is not None:
                note(_SYNCED_BUFFERS, number, 0)
            progress.stage = stages.GOOD
        if progress.stage == stages.GOOD:
            self.good_backwards = progress.good_backwards + bool(self.active)
            if self.after_good is not None and self.active:
                progress.stage = stages.IN_AFTER_GOOD
                self.after_good(state.rank_weight)
            progress.stage = stages.NOTES
        if progress.stage == stages.NOTES:
            # If a rank has no data, some ranks may make no optimizer step until the others have finished.
            if len(self.active) == self.world_size:
                drift, differ = self.drift, outcome & _NOTES_DIFFER
                drift.backwards = progress.drift_backwards + 1
                if differ or drift.is_due:
                    progress.stage = stages.IN_DRIFT
                    drift.look(result.notes if differ else None)
                if self._same_inputs is not None:
                    progress.stage = stages.IN_DRIFT
                    if not self._same_inputs.end_backward(result.statuses if outcome & _REPORTED else ()):
                        self._same_inputs = None
            progress.stage = stages.REST
        if len(self.active) == self.world_size:
            self.notes.begin(self._begun_forwards, self.drift.backwards)
        state.status.static_graph = False  # by now every rank has reported it
        self.autograd.learn()

    def _conclude_after(self, error: BaseException, progress: EndProgress) -> None:
        """Complete `_conclude` after an exception in it that the other ranks do not know of.

        If the exception came during a collective call, it is unknown whether this rank has made the call.
        Then all ranks raise.
        """
        tries = 0
        for _ in range(_MOST_INTERRUPTIONS):
            if progress.stage in stages.OF_ALL_RANKS:
                if progress.stage in (stages.IN_WRITES, stages.IN_DRIFT) and isinstance(error, Warning):
                    progress.stage += 1  # the user's filter made it an error, on all ranks
                else:
                    self.give_up(error)
                    self._close(progress.number, is_published=False)
                    return
            if progress.stage in stages.MADE_ONCE:
                progress.stage += 1
            before = progress.stage
            try:
                self._conclude(progress)
                return
            except PacelineError as found:
                if progress.stage <= stages.CLOSE:
                    self._adopt_errors(is_good=False)
                self._close(progress.number, is_published=not isinstance(found, CollectiveError))
                self._fail(found)
                return
            except BaseException as again:
                # A stage that keeps failing is skipped. If this leaves gradients that are not the means, the
                # next backward finds the rank by its parameters.
                tries = tries + 1 if progress.stage == before else 0
                if tries >= _MOST_TRIES:
                    progress.stage, tries = stages.AFTER.get(before, before), 0
                error = again
        self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        if (peer_monitor := self.communicator.peer_monitor) is not None:
            peer_monitor.fail(error)
        self.reducer.give_up(error)

    def _close(self, number: int, *, is_published: bool = True) -> None:
        self._is_complete = False
        self.end_turn()
        self.state.begin_next()
        if self.micro_batches.is_used or self.micro_batches.unweighed is not None:
            self.micro_batches.end()
        if self._set_activity is not None and is_published:
            self._set_activity(f"after backward of iteration {number - self._log.before_first}")
        self._backward_id = number + 1

    def _fail(self, error: PacelineError) -> None:
        if self.among and isinstance(error, ReplicaError):
            error.add_where(f"ranks count from 0 here: they are those of {self.among}")
        self.autograd.note_error(error)
        self.buffers.give_up_backward()
        if isinstance(error, CollectiveError):
            self._is_lost = not isinstance(error, MismatchError)  # after which the group goes on
            # A stopped rank that this one has given up on may still write into the gradient buffer.
            self.gradients.leave_buffer()

    def _adopt_errors(self, *, is_good: bool) -> None:
        if (adopt_errors := self.current_plan.reduction.adopt_errors) is not None:
            is_good = is_good and not (self._has_sparse and self.sparse.nonfinite)
            result = self.statistics.result
            adopt_errors(result.globally_unused if is_good and result is not None else None)

    def complete(self, backward: int) -> bool:
        """Hand over the gradients of this backward that are left, once.

        Returns:
            Whether this model takes part in the backward and this call was the first.
        """
        is_in_it = self.state.phase >= RUNNING and bool(self._shared) and self._backward == backward
        if not is_in_it or self._is_complete:
            return False
        self._is_complete = True
        self._remaining.hand_over(self.reducer)
        return True

    def _note_active(self, result: BackwardResult) -> None:
        if result.outcome & _FINISHED:
            statuses = result.statuses
            self.active = [rank for rank, status in enumerate(statuses) if not status.finished]
            if self.refuses_uneven and self.active:
                raise uneven_error(statuses)

    def _write_back_means(self, result: BackwardResult) -> None:
        state, current_plan = self.state, self.current_plan
        if overlapping := result.overlapping:
            self._separate_overlapping(overlapping)
        if self._static_graph is not None:
            self._static_graph.end_good()
        missing: Sequence[int] = ()
        if len(state.handed) < len(self._names):
            globally_unused = set(result.globally_unused)
            missing = [
                i for i in range(len(self._names)) if i not in state.handed and i not in globally_unused
            ]
        if missing or state.staged or current_plan.owned:
            self.gradients.write_back(missing)

    def _separate_overlapping(self, overlapping: Sequence[int]) -> None:
        """Have means of gradients that share memory copied back into memory of their own."""
        state = self.state
        for index in overlapping:
            state.handed.discard(index)
            if index in state.staged:
                state.staged.remove(index)

    def _give_up_last(self) -> None:
        if self.state.phase is OPEN:
            raise ConfigError(
                "The last backward has not been finalized: its gradients are not averaged yet.",
                where=self.who,
                seen="require_manual_backward_finalization is True",
                hint="call finalize_backward() after each synchronised backward, before the next forward",
            )
        self.settle_interrupted()
        if self.state.phase is not IDLE:
            self._give_up_interrupted()

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception ended a backward that has not been given up yet."""
        state = self.state
        if state.phase in (RUNNING, ENDING) and not self.autograd.is_in_backward():
            self._await_drop()
        return state.phase is INTERRUPTED

    def _await_drop(self) -> None:
        self.autograd.await_drop(lambda: self.state.phase < RUNNING)

    def settle_interrupted(self) -> None:
        """If an exception ended the last backward, move gradients out of memory where ranks may still write.

        The backward itself still has to be given up.
        """
        state = self.state
        if state.phase in (RUNNING, ENDING):
            self._await_drop()
        if state.phase not in (IDLE, OPEN):
            self.gradients.settle()

    def give_up_for_others(self) -> None:
        """Give up the interrupted backward, because other models make their calls after those of this one.

        Errors are suppressed here: they are this model's, and if one ends the group, its next backward
        raises.
        """
        with contextlib.suppress(PacelineError):
            self._give_up_interrupted()

    def _give_up_interrupted(self) -> None:
        """End an interrupted backward of this rank, so that the other ranks raise. Collective.

        This rank raises only if that fails, because its script has already seen the exception. So every rank
        has raised once in this backward, and all continue with the same step.
        """
        self._armed += 1  # ends that are dropped from now on belong to no current backward
        self.gradients.settle()
        if (order := self.current_plan.reduction.order) is not None:
            order.give_up_before(self)
        self.autograd.forget()
        self.graphs.end_backward()
        self.statistics.result = self.statistics.earlier_norm = None
        self._fresh.forget()
        self.buffers.give_up_backward()
        reducer, config = self.reducer, self._config
        before = reducer.last
        try:
            status = BackwardStatus(interrupted=True)
            reducer.finish(status, config.allow_unused, config.allow_globally_unused)
        except PacelineError as error:
            self.autograd.note_error(error)
            raise
        finally:
            is_lost = isinstance(sys.exc_info()[1], PacelineError)
            if is_lost or reducer.last not in (None, before):  # else the other ranks do not know of it yet
                self.end_turn()
                self._adopt_errors(is_good=False)
                self.state.begin_next()
                self.micro_batches.end()

    # --- steps of virtual ranks: sums that were made outside of autograd ---

    def settle_last(self) -> None:
        """Call before a step. If an exception ended the last one here, the other ranks raise. Collective."""
        self.state.check_process()
        self._give_up_last()

    def take_local(self) -> tuple[bool, float]:
        """Forget the backward passes in no_sync() since the last averaged one.

        Returns:
            Whether there was one, and its weight.
        """
        has_any = bool(self.state.accumulated)
        self.state.accumulated.clear()
        return has_any, self.micro_batches.take()

    def average_sums(self, sums: Mapping[int, Any], weight: float, packed: Sequence[Any]) -> None:
        """Average given sums, with the same end as that of a backward. Collective.

        Args:
            sums: This rank's sum(w * g) of each parameter, by index; None stands for zeros.
            weight: sum(w).
            packed: The sparse gradients of each micro-batch, as `Sparse.pack` returned them.
        """
        state = self.state
        self.autograd.prepare()
        state.rank_weight = weight
        self.reducer.set_weight(weight, is_in_gradients=True)
        state.expect(True, is_forced=True)
        state.phase = RUNNING
        self._armed += 1
        try:
            for index, total in sums.items():
                if total is None:
                    self.gradients.clear(index)
                    self.reducer.mark_ready(index, 0)
                else:
                    self.gradients.hand_over_sum(index, total)
        except BaseException:
            self._interrupt()
            raise
        self._packed = packed
        try:
            self._end_now()
        finally:
            self._packed = ()

    def break_off(self) -> None:
        """Discard a step that an exception or a `break` ended, with its gradients."""
        if self.state.phase is IDLE:
            self.take_local()
            self.gradients.restore({})
            self._interrupt()

    def fail_step(self, error: PacelineError) -> NoReturn:
        """Raise the error after the other ranks know that this rank does not end the step. Collective."""
        self.break_off()
        self._give_up_last()
        raise error

    # --- a backward without data ---

    def shadow(self, *, weight: float) -> bool:
        """Take part in a backward of the other ranks without gradients, within a `Shadow`. Collective.

        This rank gets the means as its gradients too, in case it makes the optimizer's steps as well.
        """
        self.state.check_process()
        self._give_up_last()
        self.gradients.restore({})  # drop those of the last shadowed backward
        self.micro_batches.forget_given()
        self.buffers.sync_without_forward()
        self._weigh(weight)
        self.state.status.finished = True
        try:
            self._end_now()
        finally:  # the caller may catch the error and continue training
            self._weigh(1.0)
        return bool(self.active)


def _outside_steps(who: str) -> ConfigError:
    return ConfigError(
        "A backward outside of the micro-batches of a step can't be averaged over virtual ranks.",
        where=who,
        seen="virtual_ranks",
        hint="for step in ddp.steps(loader): for batch in step: loss(ddp(batch)).backward()",
    )
