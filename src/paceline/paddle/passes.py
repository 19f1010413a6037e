"""The backward passes of a Paddle layer: its hooks, and when a pass begins and ends.

A pass begins at the first gradient of an output of forward, so that a rank on which no parameter gets a
gradient ends its pass too; or at that of a parameter, unless another wrapped model has it as well. It ends
when backward() is over.

In the first pass, gradients are handed over at its end. What fires more than once in it, or inside an inner
backward (reentrant recompute), is handed over at the end of all further passes, when it is complete; so is a
parameter with hooks of the user's that Paddle calls after ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from paceline import _core
from paceline.errors import CollectiveError, ConfigError
from paceline.paddle import backward_calls, internals
from paceline.paddle.arena import nbytes
from paceline.paddle.backward_calls import calls
from paceline.paddle.config import DataParallelConfig
from paceline.paddle.gradients import Gradients
from paceline.paddle.hooks import listen
from paceline.paddle.links import Link
from paceline.paddle.outputs import may_hide_tensors, tensors_in
from paceline.paddle.replica_state import hash_model, make_sampler
from paceline.paddle.sparse import average_rows
from paceline.paddle.tensors import ManagedTensors
from paceline.paddle.values import BufferSync
from paceline.paddle.weights import PaddleWeights
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.drift import DriftWatch
from paceline.reducer.end_of_backward import EndOfBackward
from paceline.reducer.graphs import Graph, Graphs
from paceline.reducer.link import Reduction, ReductionOptions
from paceline.reducer.pass_errors import Judge, StaticGraph, names_by_rank
from paceline.reducer.passes import BackwardPasses, FreshGradients
from paceline.reducer.plan import Plan, complete_order, has_one_order, plan_gradients
from paceline.reducer.protocol import Reducer
from paceline.reducer.replica_check import Entry
from paceline.reducer.sharing import registry


class GradientPasses(BackwardPasses):
    """Averages the gradients of one model in each backward.

    Args:
        tensors: The model's.
        link: Between the ranks that train it.
        config: Of the wrapped model.

    Attributes:
        buffers: Keeps them in step.
        graphs: Of forwards whose backward is still to come.
    """

    weights: PaddleWeights
    buffers: BufferSync
    _config: DataParallelConfig

    def __init__(self, tensors: ManagedTensors, link: Link, config: DataParallelConfig) -> None:
        super().__init__(tensors.names, link.rank, link.world_size)
        self._tell = link.tell
        self._error: BaseException | None = None  # of a hook, which must not raise
        self._is_closed = self._has_ended = False
        self.buffers = BufferSync(tensors, link, config.buffers, config.broadcast_buffers)
        self.gradients = FreshGradients(
            functools.partial(_fingerprint, tensors.trainable), functools.partial(_memory, tensors.trainable)
        )
        trainable = [*tensors.trainable, *tensors.sparse.values()]
        self.weights = PaddleWeights(trainable, self.state, self.keep_error, self._is_foreign)
        self.notes = _core.IterationNotes(None, make_sampler(tensors.trainable))
        self.drift = DriftWatch(config.check_replicas_every, self._hash_replica, link.all_gather)
        self._tensors = tensors
        self._link = link
        self._config = config
        self._all_names = [*tensors.names, *tensors.sparse]
        self._nonfinite_rows: list[tuple[int, int]] = []
        self._static_graph = StaticGraph(tensors.names, link.all_gather) if config.static_graph else None
        self._judge = Judge(
            self._all_names,
            link.world_size,
            allow_unused=config.allow_unused,
            nonfinite=config.nonfinite,
            static_graph=self._static_graph,
        )
        self._is_first = True
        self._at_end: dict[int, None] = {}  # to be handed over at the end of this pass, in this order
        self._always_at_end: set[int] = set(tensors.delayed)
        self._listen(True)
        self._begins_at_outputs = True
        self.graphs = Graphs(self.close)
        self._own = Gradients(tensors, self.state, live_in_arena=config.gradients_in_arena)
        self._ways = self._own.hand_over
        self._adopt(self._make_plan(None))
        self.is_order_final = has_one_order(self._plan)
        self._shared: set[int] = set()
        registry.join(self)
        self.refresh_sharing()
        backward_calls.watch()
        listen(self, self.trainable)
        self._ways += [_nothing] * len(tensors.sparse)  # rows are averaged at the end

    @property
    def trainable(self) -> Sequence[paddle.Tensor]:
        """The parameters that the plan lists, then those with sparse gradients."""
        return [*self._tensors.trainable, *self._tensors.sparse.values()]

    def refresh_sharing(self) -> None:
        """Find out which parameters other wrapped models have, too."""
        self._sharing_version = registry.version
        self._shared = registry.shared_by_others(self)
        self._own.share(self._shared)

    def close(self) -> None:
        """Listen no more. Paddle keeps the hooks; the memory goes with the last gradient that lies in it."""
        registry.leave(self)
        self._is_closed = True
        self._listen(False)

    def end(self) -> None:
        """Average no more. Gradients keep their values, and get memory of their own."""
        self._has_ended = True
        self.close()
        self._own.leave_arena()
        self.reducer.close()

    @property
    def reducer(self) -> Reducer:
        """That of the plan in use."""
        return self._reduction.reducer

    @property
    def path(self) -> str:
        """Where gradients are averaged: "memory" or "group"; a hook is as a group."""
        return self._link.path

    @property
    def is_shared(self) -> bool:
        """Whether another wrapped model holds any of the parameters."""
        return bool(self._shared)

    def begin_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """See `BackwardPasses`; cleared gradients stay where they are."""
        if self._sharing_version != registry.version and not self._is_in_backward():
            self.refresh_sharing()
        super().begin_forward(is_syncing=is_syncing, is_training=is_training)
        self._own.count_all()

    def watch(self, output: object) -> None:
        """Let the backward of these outputs begin a pass even if it reaches no parameter."""
        graph = self.graphs.add(self._on_output_gradient)
        begins_at_outputs = not may_hide_tensors(output)
        for tensor in tensors_in(output):
            if tensor.stop_gradient:
                continue
            if tensor.is_leaf:
                begins_at_outputs = False
            else:
                # Holds these passes, as long as the graph: the wrapper may be gone before backward().
                tensor.register_hook(graph.hook)
        self._begins_at_outputs = begins_at_outputs

    def _on_output_gradient(self, graph: Graph) -> None:
        """The backward of an output has begun, or paddle.grad() through it, which is no pass."""
        try:
            if not self.state.is_syncing:
                self.weights.watch_local()
            elif calls.depth and self._has_ended:
                raise ConfigError(
                    "The outputs of this backward are older than the last init_reducer().",
                    where=self.who,
                    hint="call init_reducer() between a backward and the next forward",
                )
            elif calls.depth:
                self.graphs.begin(graph)
                if not self.state.is_armed:
                    self._arm()
        except BaseException as error:
            self.keep_error(error)

    def _listen(self, is_listening: bool) -> None:
        """Take notice of gradients, or let them pass."""
        self._is_listening = is_listening
        self._is_steady = is_listening and not self._is_first  # then nothing is special about a gradient

    def keep_error(self, error: BaseException) -> None:
        """Raise the exception of a hook, which must not raise, when backward is over."""
        if self._error is None:
            self._error = error
            self._listen(False)
            # The end of a pass raises it, too; but there may be none.
            backward_calls.at_end(EndOfBackward(self._raise_kept, self._drop_kept))

    def _raise_kept(self) -> None:
        error = self._error
        if error is not None:
            self._drop_kept()
            raise error

    def _drop_kept(self) -> None:
        self._error = None
        self._listen(not self._is_closed)

    def on_gradient(self, index: int) -> None:
        """A parameter's gradient is accumulated."""
        state = self.state
        if self._is_steady and state.is_armed and state.is_syncing and index not in self._always_at_end:
            try:
                if calls.depth == 1:
                    self._ways[index]()
                else:
                    self._postpone(index)
            except BaseException as error:
                self.keep_error(error)
        elif self._is_listening:
            try:
                self._on_unusual_gradient(index)
            except BaseException as error:
                self.keep_error(error)

    def _on_unusual_gradient(self, index: int) -> None:
        state = self.state
        if not state.is_syncing:
            state.accumulated.add(index)
            return
        if not state.is_armed:
            if self._is_foreign(index):
                return
            self._arm()
        if self._is_first or index in self._always_at_end or calls.depth > 1:
            self._postpone(index)
        else:
            self._ways[index]()

    def _is_foreign(self, index: int) -> bool:
        """Whether a gradient that comes while no pass is under way is that of another wrapped model."""
        return self._is_closed or (index in self._shared and self._begins_at_outputs)

    def _postpone(self, index: int) -> None:
        """Hand the gradient over at the end of this pass, and of all others if it is not complete yet."""
        if index in self._at_end or calls.depth > 1:
            self._always_at_end.add(index)
        if index in self.state.handed:
            self._ways[index]()  # refuses
        else:
            self._at_end[index] = None

    def note_hook_of_others(self, parameter: paddle.Tensor) -> None:
        """A hook of the user's will be called after ours: hand over what it leaves."""
        self._always_at_end.update(i for i, each in enumerate(self._tensors.trainable) if each is parameter)

    def _is_in_backward(self) -> bool:
        return calls.depth > 0

    def _call_at_end(self, end: Callable[[], None]) -> None:
        backward_calls.at_end(end, before=self._hand_over_postponed)

    def _has_gradient(self, index: int) -> bool:
        return self._own.exists(index)

    def _hand_over(self, index: int) -> None:
        self._own.count(index)
        self._ways[index]()

    def _clear_place(self, index: int) -> None:
        self._own.clear_place(index)

    def _hash_replica(self, optimizer: Any) -> Sequence[Entry]:
        now, in_step = self._tensors.current_buffers(), self.buffers.in_step
        buffers = {name: buffer for name, buffer in now.items() if name in in_step}
        return hash_model(self._tensors.all_parameters, buffers, optimizer)

    def _gradients_to_keep(self) -> dict[int, Any]:
        sparse = enumerate(self._tensors.sparse.values(), len(self._names))
        return self._own.keep() | {index: internals.gradient_of(parameter) for index, parameter in sparse}

    def _set_gradients(self, gradients: dict[int, Any]) -> None:
        self._own.restore(gradients)
        for index, parameter in enumerate(self._tensors.sparse.values(), len(self._names)):
            internals.drop_gradient(parameter)
            if gradients.get(index) is not None:
                parameter.grad = gradients[index]  # Paddle copies

    def _hand_over_postponed(self) -> None:
        """Before any wrapped model ends its pass: the means must not become part of another one's."""
        try:
            if self._error is None:
                pending, self._at_end = self._at_end, {}
                if pending:
                    self._is_first = False
                    self._listen(self._is_listening)
                for index in pending:
                    self._ways[index]()
        except BaseException as error:
            self.keep_error(error)

    def _prepare_end(self) -> None:
        self._raise_kept()

    def _end(self) -> None:
        try:
            super()._end()
        except CollectiveError:
            # A rank that was stopped, and whom this one has given up, may still write into the arena.
            self._own.leave_arena()
            raise
        finally:
            self.graphs.end_pass()

    def _hand_over_rest(self) -> None:
        if self._static_graph is not None and not self.state.status.finished:
            used = self.state.accumulated.union(self.state.handed).difference(self._tensors.delayed)
            dense = used.intersection(range(len(self._names)))
            self.state.status.graph_changed = self._static_graph.has_changed(dense)
        super()._hand_over_rest()
        if self._tensors.delayed and not self.state.status.finished:
            self._complete_delayed()
        if len(self.state.handed) < len(self._names) and not self.state.status.finished:
            without = (index for index in range(len(self._names)) if index not in self.state.handed)
            unused = set(without) - self._tensors.delayed
            for index in unused:
                self._own.check_shape(index)
            self._own.leave_arena(unused)  # their places there are filled with zeros

    def _complete_delayed(self) -> None:
        """Delayed parameters that got no gradient have one of zeros, as in torch."""
        for index in self._tensors.delayed:
            if index not in self.state.handed:
                self._own.check_shape(index)
                self._own.leave_arena({index})
                self._clear_place(index)
                self.reducer.mark_ready(index, 0)

    def _forget_interrupted(self) -> None:
        self._drop_kept()
        self._at_end.clear()
        self.graphs.end_pass()

    def _sync_others(self) -> None:
        self._nonfinite_rows = []
        for index, (name, parameter) in enumerate(self._tensors.sparse.items(), len(self._names)):
            ranks = average_rows(parameter, name, self._link, self.weight)
            self._nonfinite_rows += [(rank, index) for rank in ranks]
        if self.buffers.is_needed:
            self.buffers.sync(self.active, on_demand=False)
        self._judge.judge_nonfinite(self._nonfinite_rows)

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Names of parameters whose gradient was not finite in the last pass, by rank."""
        found = super().nonfinite()
        for rank, names in names_by_rank(self._nonfinite_rows, self._all_names).items():
            found[rank] = (*found.get(rank, ()), *names)
        return found

    def broadcast_model(self, root: int) -> None:
        """Give every rank the parameters and buffers of the rank `root`. Collective."""
        values = [*self._tensors.all_parameters.values(), *self._tensors.current_buffers().values()]
        self._link.broadcast(values, root)

    def _bring_home(self) -> None:
        if self._static_graph is not None:
            self._static_graph.end_good()
        is_complete = len(self.state.handed) == len(self._names)
        self._own.place_means(set() if is_complete else set(self.reducer.globally_unused()))

    def _adopt_order(self, order: list[int]) -> None:
        self.is_order_final = True
        agreed = paddle.to_tensor(complete_order(order, len(self._tensors.trainable)), "int32")
        self._link.broadcast([agreed])
        plan = self._make_plan(agreed.tolist())
        if plan != self._plan:
            self._replace(plan)

    def use_hook(self, hook: CommHook, process_group: Any) -> None:
        """Give every bucket to a hook from now on. Not within a pass; collective."""
        self._link = self._link.with_hook(hook, process_group)
        self._tell = self._link.tell
        self._replace(self._make_plan(list(self._plan.order)))
        self.is_order_final = self.is_order_final or has_one_order(self._plan)

    def _replace(self, plan: Plan) -> None:
        reduction, before = self._reduction, self.reducer
        self._of_first = (before.squared_norm(), before.nonfinite())
        self._waited_before_s += before.waited_s
        must_move = self._own.any_in_arena
        # Where the arena is free there need never be two.
        self._adopt(plan, instead_of=None if must_move else reduction)
        if must_move:
            before.close()

    def _adopt(self, plan: Plan, instead_of: Reduction[paddle.Tensor] | None = None) -> None:
        config, parameters = self._config, self._tensors.trainable
        finite = config.nonfinite != "ignore"
        options = ReductionOptions(config.gradients_in_arena, finite, config.skip_unused)
        self._plan = plan
        self._reduction = self._link.make_reduction(plan, parameters, options, instead_of)
        self._own.adopt(self._reduction)

    def _make_plan(self, order: list[int] | None) -> Plan:
        whole = self._link.wants_whole_buckets
        return plan_gradients(self._tensors.specs(), self._config, order, whole=whole)


def _nothing() -> None:
    """What a parameter with sparse gradients hands over."""


def _fingerprint(parameters: Sequence[paddle.Tensor]) -> list[tuple[int, int]]:
    """Tells whether a gradient was changed, or replaced."""
    gradients = map(internals.gradient_of, parameters)
    return [(g.data_ptr(), g.inplace_version) for g in gradients if g is not None]


def _memory(parameters: Sequence[paddle.Tensor]) -> tuple[list[int], list[int]] | None:
    """Addresses and sizes of all gradients; None where one is on another device, or has gaps."""
    gradients = [g for g in map(internals.gradient_of, parameters) if g is not None]
    if not all(g.place.is_cpu_place() and g.is_contiguous() for g in gradients):
        return None
    return [g.data_ptr() for g in gradients], [nbytes(g) for g in gradients]
