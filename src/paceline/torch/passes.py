"""One backward pass after the other, from the first gradient to the last mean.

A pass begins at the first hook that fires: a parameter's, or that of an output of forward, so that a rank on
which no parameter gets a gradient ends its pass too. Whichever comes first queues `_end` in autograd's
engine, which calls it when the backward is over; it waits for the other ranks and judges the pass.

The order in which gradients came in the first pass, on rank 0, becomes everybody's plan.
"""

from __future__ import annotations

import contextlib
import functools
import math
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch.autograd import Variable
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from paceline.reducer.pass_state import PassState
from paceline.reducer.plan import Plan, complete_order, plan_buckets
from paceline.reducer.protocol import FINISHED, Outcome
from paceline.reducer.verdict import Judge, give_up_interrupted
from paceline.torch.buffer_sync import BufferSync
from paceline.torch.buffers import broadcast_tensors
from paceline.torch.config import DDPConfig
from paceline.torch.hooks import copy_hook, pointer_hook, view_hook
from paceline.torch.parameters import ManagedTensors
from paceline.torch.peers import Peers
from paceline.torch.reduction import Reduction, ReductionFactory
from paceline.torch.running_call import RunningCall, running_call
from paceline.torch.statistics import FreshGradients
from paceline.torch.weights import MicroBatchWeights


class GradientPasses:
    """Averages the gradients of one model in each backward.

    Args:
        tensors: The model's.
        peers: The ranks that train it.
        factory: Makes the memory and the reducer of each plan.
        config: Of the wrapped model.

    Attributes:
        state: Shared with the hooks.
        weights: Of this rank's micro-batches.
        buffers: Keeps them in step.
        gradients: Whether they are still those of the last pass.
        active: Ranks that had data in the last pass. Others shadow it.
    """

    def __init__(
        self, tensors: ManagedTensors, peers: Peers, factory: ReductionFactory, config: DDPConfig
    ) -> None:
        self.state = PassState()
        self.state.arm = self._arm
        self.buffers = BufferSync(tensors, peers, factory, config.buffers, config.broadcast_buffers)
        self.gradients = FreshGradients(tensors.trainable)
        self._of_first: tuple[float, list[tuple[int, int]]] | None = None
        self.weights = MicroBatchWeights(tensors.trainable, self.state)
        self._tensors = tensors
        self._peers = peers
        self._factory = factory
        self._config = config
        self._judge = Judge(
            tensors.names, peers.world_size, allow_unused=config.allow_unused, nonfinite=config.nonfinite
        )
        self._begun_forwards = 0
        self._all_ranks = range(peers.world_size)
        self.active: Sequence[int] = self._all_ranks
        self._waited_before_s = 0.0
        self._pass_number = 1
        self._handles: list[RemovableHandle] = []
        self._plan = self._make_plan(None)
        self._reduction = factory.make(self._plan, tensors.trainable)
        # With one bucket for each kind of parameter, any order is as good as any other.
        self._is_order_final = len(self._plan.buckets) <= len(self._plan.sections)
        self._install_hooks()

    @property
    def path(self) -> str:
        """Where gradients are averaged: "memory" or "group"."""
        return self._factory.path

    @property
    def reduction(self) -> Reduction:
        return self._reduction

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent waiting for the others at the end of backward, in all passes."""
        return self._waited_before_s + self._reduction.reducer.waited_s

    def squared_norm(self) -> float:
        """Of the last pass's mean gradient."""
        return self._reduction.reducer.squared_norm() if self._of_first is None else self._of_first[0]

    def known_norm(self) -> float | None:
        """The 2-norm of all .grad, if it is that of the last pass's means."""
        if not self.gradients.are_unchanged() or self._reduction.reducer.globally_unused():
            return None
        return math.sqrt(self.squared_norm())

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        """Names of parameters whose gradient was not finite in the last pass, by rank."""
        pairs = self._reduction.reducer.nonfinite() if self._of_first is None else self._of_first[1]
        found: dict[int, list[str]] = {}
        for rank, index in sorted(set(pairs)):
            found.setdefault(rank, []).append(self._tensors.names[index])
        return {rank: tuple(names) for rank, names in found.items()}

    def close(self) -> None:
        """Remove the hooks. The memory goes with the last gradient that lies in it."""
        self.weights.close()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """Note a forward whose gradients will be needed.

        Raises:
            ForkedError: This process is a forked child of the one that wrapped the model.
            SkippedPassError: The backward before this forward ended in an exception, on this rank.
        """
        state = self.state
        state.check_process()
        if state.is_armed and torch._C._current_graph_task_id() == -1:
            self._give_up_interrupted()
        if self.weights.is_used and torch._C._current_graph_task_id() == -1:
            self.weights.give_up_interrupted()
        self._begun_forwards += 1
        state.is_syncing = is_syncing
        self._say("in forward of")
        # Forwards in eval mode often have no backward, on some ranks only; such a rank skips nothing.
        if is_syncing and is_training:
            state.forwards += 1

    def watch(self, output: object) -> None:
        """Let the backward of these outputs begin a pass even if it reaches no parameter."""
        tensors = [output] if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._on_output_gradient)  # type: ignore[no-untyped-call]

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        state = self.state
        if not state.is_syncing:
            self.weights.watch_local()
        elif not state.is_armed and running_call() is RunningCall.BACKWARD:
            self._arm()

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

    def _arm(self) -> None:
        self.state.check_process()
        if self.weights.is_used:
            self._reduction.reducer.set_weight(self.weights.begin())
        self.state.is_armed = True  # first: gradients on another device come from another thread
        Variable._execution_engine.queue_callback(self._end)
        self._say("in backward of")

    def _end(self) -> None:
        """The end of this rank's backward: wait for the others, judge, and bring the means home."""
        state = self.state
        try:
            if len(state.handed) < len(self._tensors.trainable) and state.forwards != FINISHED:
                self._hand_over_accumulated()
            outcome = self._reduction.reducer.finish(state.forwards, self._config.allow_unused)
            self.active = self._all_ranks
            if outcome:
                self._note_active(Outcome(outcome))
                self._judge.judge(Outcome(outcome), self._reduction.reducer)
            if self.active:
                self._bring_home()
            order = None if self._is_order_final else list(state.handed)
            self._of_first = None
        finally:
            state.begin_next()
            self.weights.end()
            if self.gradients.is_used:
                self.gradients.note()
            self._say("after backward of")
            self._pass_number += 1
        if order is not None:
            self._adopt_order(order)
        if self.buffers.is_needed and self.active:
            self.buffers.sync(self.active, on_demand=False)

    @property
    def world_size(self) -> int:
        return self._peers.world_size

    def shadow(self, *, weight: float) -> bool:
        """Take part in a pass of the others without gradients. Collective.

        Every rank that shadows gets the means in .grad as well.

        Returns:
            Whether any rank had data.
        """
        self.state.check_process()
        reducer = self._reduction.reducer
        reducer.set_weight(weight)
        if not self._config.allow_unused:  # nothing is unused because this rank has no data
            for index, view in enumerate(self._reduction.arena.views):
                view.zero_()
                reducer.mark_ready(index, 0)
        self.state.forwards = FINISHED
        self._end()
        self._reduction.reducer.set_weight(1.0)
        return bool(self.active)

    def broadcast_model(self, root: int) -> None:
        """Give every rank the parameters and buffers of the rank `root`. Collective."""
        tensors = [*self._tensors.all_parameters.values(), *self._tensors.current_buffers().values()]
        broadcast = functools.partial(self._factory.broadcast, root=root)
        broadcast_tensors(tensors, self._peers.rank, broadcast, root=root)

    def _note_active(self, outcome: Outcome) -> None:
        if Outcome.FINISHED in outcome:
            forwards = self._reduction.reducer.forwards_by_rank()
            self.active = [rank for rank, count in enumerate(forwards) if count != FINISHED]

    def _say(self, doing: str) -> None:
        """Let the errors of other ranks tell what this one was doing."""
        core = self._factory.host_group
        if core is not None:
            core.set_activity(f"{doing} pass {self._pass_number}")

    def _hand_over_accumulated(self) -> None:
        """Hand over gradients that this backward did not touch but that count all the same.

        Those of no_sync() passes; and, where unused parameters are allowed, any gradient that is left
        from before: the others add to theirs, so it must take part in the mean.
        """
        state = self.state
        for index, parameter in enumerate(self._tensors.trainable):
            counts = index in state.accumulated or self._config.allow_unused
            if index not in state.handed and counts and parameter.grad is not None:
                self._hooks[index](parameter)

    def _bring_home(self) -> None:
        """Make every parameter's .grad the mean, where the reducer has not done so itself."""
        state, views = self.state, self._reduction.arena.views
        with torch.no_grad():
            for index in state.staged:
                state.handed[index].copy_(views[index])
            if len(state.handed) == len(views):
                return
            nobodys = set(self._reduction.reducer.globally_unused())
            for index, parameter in enumerate(self._tensors.trainable):
                if index not in state.handed and index not in nobodys:
                    view = views[index]
                    parameter.grad = view if self._config.gradients_in_arena else view.clone()

    def _adopt_order(self, order: list[int]) -> None:
        """Plan anew, in the order that rank 0 saw; once, after the first good pass. Collective."""
        self._is_order_final = True
        count = len(self._tensors.trainable)
        payload = torch.frombuffer(array("i", complete_order(order, count)), dtype=torch.uint8)
        self._factory.broadcast(payload)
        plan = self._make_plan(payload.view(torch.int32).tolist())
        if plan == self._plan:
            return
        before = self._reduction
        self._of_first = (before.reducer.squared_norm(), before.reducer.nonfinite())
        self._waited_before_s += before.reducer.waited_s
        self._plan = plan
        if self._config.gradients_in_arena:
            self._reduction = self._factory.make(plan, self._tensors.trainable)
            self._move_gradients(before)
            before.reducer.close()
        else:  # the arena is free, so there need never be two
            self._reduction = self._factory.make(plan, self._tensors.trainable, instead_of=before)
        self._install_hooks()

    def _move_gradients(self, before: Reduction) -> None:
        views = zip(self._tensors.trainable, before.arena.views, self._reduction.arena.views)
        for parameter, old, new in views:
            if parameter.grad is old:
                parameter.grad = new.copy_(old)

    def _install_hooks(self) -> None:
        self._remove_hooks()
        make = copy_hook
        if self._config.gradients_in_arena:
            make = view_hook
        elif self._reduction.takes_pointers:
            make = pointer_hook
        reducer, views = self._reduction.reducer, self._reduction.arena.views
        self._hooks = [
            make(self.state, index, name, view, reducer)
            for index, (name, view) in enumerate(zip(self._tensors.names, views))
        ]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for parameter, hook in zip(self._tensors.trainable, self._hooks)
        ]

    def _give_up_interrupted(self) -> None:
        """End the pass that an exception broke off, so that all ranks learn of it and can go on."""
        error = give_up_interrupted(self._reduction.reducer, allow_unused=self._config.allow_unused)
        self.state.begin_next()
        self.weights.end()
        if error is not None:
            raise error

    def _make_plan(self, order: list[int] | None) -> Plan:
        return plan_buckets(
            self._tensors.specs(),
            bucket_cap_bytes=self._config.bucket_cap_bytes,
            first_bucket_bytes=self._config.first_bucket_bytes,
            order=order,
        )
