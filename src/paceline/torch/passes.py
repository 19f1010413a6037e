"""The backward passes of a torch module: its hooks, its tensors, its autograd.

A pass begins at the first hook that fires: a parameter's, or that of an output of forward, so that a rank on
which no parameter gets a gradient ends its pass too. Whichever comes first queues the end of the pass in
autograd's engine, which calls it when the backward is over.

The order in which gradients came in the first pass, on rank 0, becomes everybody's plan.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable, profiler

from paceline.errors import PacelineError
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.drift import DriftWatch
from paceline.reducer.frozen import digest_of
from paceline.reducer.graphs import Graph, Graphs
from paceline.reducer.link import Link, Reduction, ReductionOptions
from paceline.reducer.pass_errors import GraphVariety, Judge, StaticGraph, names_by_rank
from paceline.reducer.passes import BackwardPasses, FreshGradients
from paceline.reducer.plan import Plan, complete_order, has_one_order, plan_gradients
from paceline.reducer.protocol import Reducer
from paceline.reducer.replica_check import Entry
from paceline.reducer.sharing import registry
from paceline.torch.accumulated import part_accumulated
from paceline.torch.arena import extent
from paceline.torch.buffer_sync import BufferSync
from paceline.torch.compiling import untraced
from paceline.torch.config import DDPConfig
from paceline.torch.graphs import RunningCall, running_call, tensors_in
from paceline.torch.hooks import (
    HookMaker,
    changed_gradient,
    copy_hook,
    in_own_passes,
    pointer_hook,
    reshaped_parameter,
    sparse_hook,
    view_hook,
)
from paceline.torch.last_hooks import LastHooks
from paceline.torch.late import LateGradients
from paceline.torch.logging_data import ErrorNote
from paceline.torch.optimizer_in_backward import Steppers, step_in_backward, take_over_optimizers
from paceline.torch.parameters import ManagedTensors
from paceline.torch.pass_times import PassTimes, profiled
from paceline.torch.replica_state import hash_model, make_notes
from paceline.torch.sparse import SparseMeans
from paceline.torch.weights import TorchWeights


class GradientPasses(BackwardPasses):
    """Averages the gradients of one model in each backward.

    Args:
        tensors: The model's.
        link: Between the ranks that train it.
        config: Of the wrapped model.

    Attributes:
        buffers: Keeps them in step.
        graphs: Of forwards whose backward is still to come.
        errors: Where it notes what a pass raised.
    """

    weights: TorchWeights
    buffers: BufferSync
    _config: DDPConfig

    def __init__(self, tensors: ManagedTensors, link: Link[torch.Tensor], config: DDPConfig) -> None:
        super().__init__(tensors.names, link.rank, link.world_size)
        self.buffers = BufferSync(tensors, link, config.buffers, config.broadcast_buffers)
        self.gradients = FreshGradients(
            functools.partial(_fingerprint, tensors.trainable), functools.partial(_memory, tensors.trainable)
        )
        self.weights = TorchWeights(tensors.trainable, self.state)
        self.notes = make_notes(tensors.trainable)
        self.drift = DriftWatch(config.check_replicas_every, self._hash_replica, link.all_gather)
        self._tensors = tensors
        self._link = link
        self._tell = link.tell
        self.errors = ErrorNote()
        self.times = PassTimes(is_timing=tensors.device_kinds == {"cpu"})
        self._variety = GraphVariety(len(tensors.names) - len(tensors.delayed))
        self._last_hooks: LastHooks | None = None
        self._frozen: frozenset[int] = (
            frozenset()
        )  # in the forwards before the pass, or those of the last one
        self._is_frozen_noted = False
        self._shapes = [parameter.shape for parameter in tensors.trainable]
        self.use_config(config)
        self.graphs = Graphs(self.close)
        self._in_backward: Steppers = []
        self._sparse = SparseMeans([(i, tensors.trainable[i]) for i in sorted(tensors.sparse)], link)
        self._plan = self._make_plan(None)
        self._reduction = link.make_reduction(self._plan, tensors.trainable, self._options)
        self.is_order_final = has_one_order(self._plan)
        self._shared: set[int] = set()
        registry.join(self)
        self.refresh_sharing()
        self._install_hooks()

    def use_config(self, config: DDPConfig) -> None:
        """Judge passes by other options than before. Not within a pass; on every rank."""
        self._config = config
        self._late = LateGradients(
            self.state, self._hand_over, self._tensors.delayed, is_learning=config.static_graph
        )
        self._static_graph = (
            StaticGraph(self._tensors.names, self._link.all_gather) if config.static_graph else None
        )
        self._judge = Judge(
            self._tensors.names,
            self._link.world_size,
            allow_unused=config.allow_unused,
            nonfinite=config.nonfinite,
            static_graph=self._static_graph,
        )
        if self._last_hooks is not None:
            self._install_hooks()

    @property
    def trainable(self) -> Sequence[torch.Tensor]:
        return self._tensors.trainable

    def refresh_sharing(self) -> None:
        """Find out which parameters other wrapped models have, too."""
        self._sharing_version = registry.version
        before, self._shared = self._shared, registry.shared_by_others(self)
        if self._shared != before:
            self._install_hooks()

    @property
    def path(self) -> str:
        """Where gradients are averaged: "memory" or "group"."""
        return self._link.path

    @property
    def reduction(self) -> Reduction[torch.Tensor]:
        return self._reduction

    @property
    def reducer(self) -> Reducer:
        """That of the plan in use."""
        return self._reduction.reducer

    def close(self) -> None:
        """Remove the hooks. The memory goes with the last gradient that lies in it."""
        registry.leave(self)
        self.weights.close()
        self._remove_hooks()

    def _put_last(self, moved: Sequence[int]) -> None:
        assert self._last_hooks is not None
        self._last_hooks.put_last(moved)

    def _remove_hooks(self) -> None:
        if self._last_hooks is not None:
            self._last_hooks.remove()

    def begin_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """Note a forward whose gradients will be needed."""
        if not self._begun_forwards:
            self._in_backward = take_over_optimizers(self._tensors.trainable)
        if self._sharing_version != registry.version and not self._is_in_backward():
            self.refresh_sharing()
        super().begin_forward(is_syncing=is_syncing, is_training=is_training)
        if not is_syncing:
            return
        if self.good_passes >= self.times.next_pass:
            self.times.begin_forward(self.good_passes)
        frozen = self._tensors.frozen_now  # what one of several forwards trains is not
        self._frozen = self._frozen & frozen if self._is_frozen_noted else frozen
        self._is_frozen_noted = True
        if not self.state.is_armed and (moved := self._not_last()):
            self._put_last(moved)
        if self.buffers.hook is not None:
            self.buffers.hook.before_forward(self._tensors.current_buffers())

    def watch(self, output: object) -> None:
        """Let the backward of these outputs begin a pass even if it reaches no parameter."""
        if self.buffers.hook is not None and self.state.is_syncing:
            self.buffers.hook.after_forward(self._tensors.current_buffers())
        graph = self.graphs.add(self._on_output_gradient)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(graph.hook)  # type: ignore[no-untyped-call]

    @untraced
    def _on_output_gradient(self, graph: Graph) -> None:
        state = self.state
        if not state.is_syncing:
            if state.accumulated:
                part_accumulated(self._tensors.trainable, state.accumulated)
            self.weights.watch_local()
            return
        call = RunningCall.BACKWARD if state.is_armed else running_call()
        if call in (RunningCall.BACKWARD, RunningCall.UNKNOWN):
            self.graphs.begin(graph)
        if call is RunningCall.BACKWARD and not state.is_armed:
            self._arm()

    @untraced
    def _arm(self) -> None:
        if self.state.accumulated:
            part_accumulated(self._tensors.trainable, self.state.accumulated)
        try:
            super()._arm()
        except PacelineError as error:
            self.errors.add(error)
            raise
        if moved := self._not_last():  # hooks were registered since forward
            self._put_last(moved)

    def _is_in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    @untraced
    def _end(self) -> None:
        try:
            super()._end()
            self.state.status.static_graph = False
            if self._late.learn():
                self._install_hooks()
        except PacelineError as error:
            self.errors.add(error)
            raise
        finally:
            self._is_frozen_noted = False
            self.graphs.end_pass()

    def _forget_interrupted(self) -> None:
        self._late.forget()
        self._is_frozen_noted = False
        self.graphs.end_pass()

    def _hand_over_rest(self) -> None:
        without = self._late.end_pass()
        if self._static_graph is not None:
            if not self.state.status.finished:
                self.state.status.graph_changed = self._static_graph.has_changed(self._used())
        elif len(self.state.handed) < len(self._names) and not self.state.status.finished:
            self._variety.note(self._used)
        super()._hand_over_rest()
        if not self.state.status.finished:
            for index in without:  # torch keeps their gradients in a buffer that begins with zeros
                if index not in self.state.handed:
                    self._clear_place(index)
                    self.reducer.mark_ready(index, 0)
            if self._frozen and not self._config.allow_unused:
                self._leave_idle(self._frozen)
            self._refuse_changed()

    def _used(self) -> set[int]:
        """Parameters that have got gradients since the last pass, and wait for no others'."""
        return self.state.accumulated.union(self.state.handed).difference(self._tensors.delayed)

    @property
    def is_graph_static(self) -> bool:
        """Whether this rank has used the same parameters in all passes so far."""
        return self._static_graph is not None or self._variety.is_static(self.good_passes)

    def _leave_idle(self, frozen: frozenset[int]) -> None:
        """Say which parameters have no gradient in this pass because they are frozen."""
        with_gradient = self._tensors.delayed.union(self.state.handed)  # zeros at least
        idle = sorted(frozen.difference(with_gradient))
        if idle:
            self.state.status.frozen = digest_of(idle)
        for index in idle:  # what is left there stays as it is, while their places become zeros
            parameter = self._tensors.trainable[index]
            if parameter.grad is self._reduction.places[index]:
                parameter.grad = parameter.grad.clone()

    def _refuse_changed(self) -> None:
        """Refuse gradients that are not what the reducer was given, and parameters of another shape."""
        state, names, trainable = self.state, self._names, self._tensors.trainable
        if state.refusal is not None or state.status.twice is not None:
            return
        for changed in state.handed.changed():
            handed, now = state.handed[changed], trainable[changed].grad
            if handed is not now or not self._shares_version(changed):
                state.refuse(changed, changed_gradient(names[changed], state.where, handed, now))
                break
        if len(state.handed) == len(names):
            return
        for index, expected in enumerate(self._shapes):  # those without a gradient get the others' mean
            if trainable[index].shape != expected and index not in state.handed:
                error = reshaped_parameter(names[index], state.where, trainable[index].shape, expected)
                state.refuse(index, error)

    def _shares_version(self, index: int) -> bool:
        """Whether other gradients lie in the same memory: autograd has cut them from one tensor.

        They count their changes together, so what was added to another one says nothing of this one. In the
        arena each counts its own.
        """
        handed, gradient = self.state.handed, self.state.handed[index]
        if gradient is self._reduction.places[index]:
            return False
        storage = gradient.untyped_storage().data_ptr()
        others = [handed[other] for other in handed if other != index]
        return any(
            other is not None and not other.is_sparse and other.untyped_storage().data_ptr() == storage
            for other in others
        )

    def _call_at_end(self, end: Callable[[], None]) -> None:
        if self.times.is_begun:
            end = self.times.timed(end, self.reducer)
        if profiler._is_profiler_enabled:
            end = profiled(end)
        Variable._execution_engine.queue_callback(end)

    def _has_gradient(self, index: int) -> bool:
        return self._tensors.trainable[index].grad is not None

    def _hand_over(self, index: int) -> None:
        self._hooks[index](self._tensors.trainable[index])

    def _clear_place(self, index: int) -> None:
        self._reduction.places[index].zero_()

    def _gradients_to_keep(self) -> dict[int, Any]:
        kept: dict[int, Any] = {}
        for index, parameter in enumerate(self._tensors.trainable):
            gradient = parameter.grad
            if gradient is not None:
                is_at_home = gradient is self._reduction.places[index]
                kept[index] = (gradient.clone() if is_at_home else gradient, is_at_home)
        return kept

    def _set_gradients(self, gradients: dict[int, Any]) -> None:
        for index, parameter in enumerate(self._tensors.trainable):
            gradient, is_at_home = gradients.get(index, (None, False))
            if is_at_home:  # in the place of the plan that is in use now
                gradient = self._reduction.places[index].copy_(gradient)
            parameter.grad = gradient

    def _sync_others(self) -> None:
        if self.buffers.hook is not None:
            self.buffers.hook.end_pass()
        elif self.buffers.is_needed:
            self.buffers.sync(self.active, on_demand=False)

    def broadcast_model(self, root: int) -> None:
        """Give every rank the parameters and buffers of the rank `root`. Collective."""
        tensors = [*self._tensors.all_parameters.values(), *self._tensors.current_buffers().values()]
        self._link.broadcast(tensors, root)

    def _hash_replica(self, optimizer: Any) -> Sequence[Entry]:
        now, in_step = self._tensors.current_buffers(), self.buffers.in_step
        buffers = {name: buffer for name, buffer in now.items() if name in in_step}
        return hash_model(self._tensors.all_parameters, buffers, optimizer)

    def squared_norm(self) -> float:
        """Of the last pass's mean gradient."""
        return super().squared_norm() + self._sparse.squared_norm

    def known_norm(self) -> float | None:
        """The 2-norm of all gradients, if it is that of the last pass's means."""
        return None if self._tensors.sparse else super().known_norm()

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Names of parameters whose gradient was not finite in the last pass, by rank."""
        found = super().nonfinite()
        for rank, names in names_by_rank(self._sparse.nonfinite, self._names).items():
            found[rank] = (*found.get(rank, ()), *names)
        return found

    def _bring_home(self) -> None:
        if self._static_graph is not None:
            self._static_graph.end_good()
        self._place_means()
        if self._tensors.sparse:
            self._sparse.average(self.weight, has_data=not self.state.status.finished)
            self._judge.judge_nonfinite(self._sparse.nonfinite)
        step_in_backward(self._in_backward)

    def _place_means(self) -> None:
        state, views = self.state, self._reduction.places
        is_complete = len(state.handed) == len(views)
        if is_complete and not state.staged:
            return
        with torch.no_grad():
            for index in state.staged:
                state.handed[index].copy_(views[index])
            if is_complete:
                return
            nobodys = set(self._unused_by_all())
            for index, parameter in enumerate(self._tensors.trainable):
                if index not in state.handed and index not in nobodys and index not in self._tensors.sparse:
                    view = views[index]
                    is_own = self._config.gradients_in_arena and index not in self._shared
                    is_at_home = is_own and view.dtype is parameter.dtype
                    parameter.grad = view if is_at_home else view.to(parameter.dtype, copy=True)

    def _adopt_order(self, order: list[int]) -> None:
        self.is_order_final = True
        count = len(self._tensors.trainable)
        payload = torch.frombuffer(array("i", complete_order(order, count)), dtype=torch.uint8)
        self._link.broadcast([payload])
        plan = self._make_plan(payload.view(torch.int32).tolist())
        if plan == self._plan:
            return
        self._replace_reduction(plan)

    def use_hook(self, hook: CommHook, process_group: Any) -> None:
        """Give every bucket to a hook from now on. Collective."""
        self._link = self._link.with_hook(hook, process_group)
        self._tell = self._link.tell
        self._replace_reduction(self._make_plan(list(self._plan.order)))
        self.is_order_final = self.is_order_final or has_one_order(self._plan)

    def _replace_reduction(self, plan: Plan) -> None:
        before = self._reduction
        self._of_first = (before.reducer.squared_norm(), before.reducer.nonfinite())
        self._waited_before_s += before.reducer.waited_s
        self._plan = plan
        if self._config.gradients_in_arena:
            self._reduction = self._link.make_reduction(plan, self._tensors.trainable, self._options)
            self._move_gradients(before)
            before.reducer.close()
        else:  # the arena is free, so there need never be two
            self._reduction = self._link.make_reduction(
                plan, self._tensors.trainable, self._options, instead_of=before
            )
        self._install_hooks()

    @property
    def _options(self) -> ReductionOptions:
        config = self._config
        finite = config.nonfinite != "ignore"
        return ReductionOptions(config.gradients_in_arena, finite, config.skip_unused)

    def _make_plan(self, order: list[int] | None) -> Plan:
        whole = self._link.wants_whole_buckets
        specs = self._tensors.specs(self._config.reduce_dtype, complex_as_real=not whole)
        return plan_gradients(specs, self._config, order, whole=whole)

    def _move_gradients(self, before: Reduction[torch.Tensor]) -> None:
        views = zip(self._tensors.trainable, before.places, self._reduction.places)
        for parameter, old, new in views:
            if parameter.grad is old:
                parameter.grad = new.copy_(old)

    def _install_hooks(self) -> None:
        self._remove_hooks()
        reducer, views = self._reduction.reducer, self._reduction.places
        places = zip(self._tensors.names, self._tensors.trainable, views)
        self._hooks = [
            self._kind_of_hook(index, parameter, view)(
                self.state, index, name, view, reducer, parameter.dtype
            )
            for index, (name, parameter, view) in enumerate(places)
        ]
        late, trainable = self._late, self._tensors.trainable
        registered = [
            late.hook(index) if late.is_late(index) else hook for index, hook in enumerate(self._hooks)
        ]
        for index in self._shared:
            registered[index] = in_own_passes(self.state, self.graphs, registered[index])
        if self._tensors.trigger is not None:
            registered[self._tensors.trigger] = late.with_trigger(registered[self._tensors.trigger])
        self._last_hooks = LastHooks(trainable, registered)
        self._not_last = self._last_hooks.not_last
        # Another wrapped model brings its own means to what both have, in the same backward.
        watched = [None if index in self._shared else p for index, p in enumerate(trainable)]
        self.state.handed.watch(watched, "grad", "_version")

    def _kind_of_hook(self, index: int, parameter: torch.Tensor, view: torch.Tensor) -> HookMaker:
        if index in self._tensors.sparse:
            return functools.partial(sparse_hook, shape=self._shapes[index])
        if view.dtype is not parameter.dtype or index in self._shared:
            return copy_hook
        if self._config.gradients_in_arena:
            return view_hook
        # What lies in memory may be the conjugate of a complex gradient.
        if self._reduction.takes_pointers:
            return copy_hook if parameter.is_complex() else pointer_hook
        if self._config.batched_copies:
            return functools.partial(copy_hook, put=self._reduction.put)
        return copy_hook


def _fingerprint(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Tells whether a gradient was changed, or replaced."""
    gradients = [p.grad for p in parameters]
    return [(id(g), g._version) for g in gradients if g is not None]


def _memory(parameters: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Addresses and sizes of all gradients; None where one is on another device, or sparse."""
    pointers, sizes = [], []
    for gradient in [p.grad for p in parameters]:
        if gradient is None:
            continue
        if not gradient.is_cpu or gradient.layout is not torch.strided:
            return None
        pointers.append(gradient.data_ptr())
        sizes.append(extent(gradient))
    return pointers, sizes
