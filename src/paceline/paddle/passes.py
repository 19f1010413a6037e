"""The backward passes of a Paddle layer: its hooks and its tensors.

A pass begins at the first gradient, or at that of an output of forward, so that a rank on which no parameter
gets a gradient ends its pass too. It ends when backward() is over.

In the first pass, gradients are handed over at its end. What fires more than once in it, or inside an inner
backward (reentrant recompute), is handed over at the end of all further passes, when it is complete.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import paddle

from paceline.errors import ConfigError
from paceline.paddle import backward_calls, internals
from paceline.paddle.arena import dtype_name
from paceline.paddle.config import DataParallelConfig
from paceline.paddle.links import Link, Reduction
from paceline.paddle.replica_state import gather_bytes, hash_model, make_sampler
from paceline.paddle.sparse import average_rows
from paceline.paddle.statistics import fingerprint, memory
from paceline.paddle.tensors import ManagedTensors
from paceline.paddle.values import BufferSync
from paceline.paddle.weights import PaddleWeights
from paceline.reducer.backward_passes import BackwardPasses
from paceline.reducer.drift import DriftWatch
from paceline.reducer.fresh_gradients import FreshGradients
from paceline.reducer.iteration_notes import IterationNotes
from paceline.reducer.plan import Plan, complete_order, plan_buckets
from paceline.reducer.protocol import Reducer
from paceline.reducer.replica_check import Entry
from paceline.reducer.report import names_by_rank
from paceline.reducer.verdict import Judge


class GradientPasses(BackwardPasses):
    """Averages the gradients of one model in each backward.

    Args:
        tensors: The model's.
        link: Between the ranks that train it.
        config: Of the wrapped model.

    Attributes:
        buffers: Keeps them in step.
    """

    weights: PaddleWeights
    buffers: BufferSync
    _config: DataParallelConfig

    def __init__(self, tensors: ManagedTensors, link: Link, config: DataParallelConfig) -> None:
        super().__init__(tensors.names, link.rank, link.world_size)
        self._error: BaseException | None = None  # of a hook, which must not raise
        self.buffers = BufferSync(tensors, link, config.buffers, config.broadcast_buffers)
        self.gradients = FreshGradients(
            functools.partial(fingerprint, tensors.trainable), functools.partial(memory, tensors.trainable)
        )
        self.weights = PaddleWeights(
            [*tensors.trainable, *tensors.sparse.values()], self.state, self._keep_error
        )
        self.notes = IterationNotes(None, make_sampler(tensors.trainable))
        self.drift = DriftWatch(
            config.check_replicas_every,
            self._hash_replica,
            functools.partial(gather_bytes, link),
        )
        self._tensors = tensors
        self._link = link
        self._config = config
        self._all_names = [*tensors.names, *tensors.sparse]
        self._nonfinite_rows: list[tuple[int, int]] = []
        self._judge = Judge(
            self._all_names, link.world_size, allow_unused=config.allow_unused, nonfinite=config.nonfinite
        )
        self._is_first = True
        self._at_end: dict[int, None] = {}  # to be handed over at the end of this pass, in this order
        self._always_at_end: set[int] = set()
        self._adopt(self._make_plan(None))
        # With one bucket for each kind of parameter, any order is as good as any other.
        self.is_order_final = len(self._plan.buckets) <= len(self._plan.sections)
        backward_calls.watch()
        for index, parameter in enumerate(tensors.trainable):
            internals.on_gradient(parameter, _weak_hook(self, index))
        for parameter in tensors.sparse.values():
            internals.on_gradient(parameter, _weak_hook(self, None))

    @property
    def reducer(self) -> Reducer:
        """That of the plan in use."""
        return self._reduction.reducer

    @property
    def path(self) -> str:
        """Where gradients are averaged: "memory" or "group"."""
        return self._link.path

    def begin_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """See `BackwardPasses`; cleared gradients stay where they are."""
        super().begin_forward(is_syncing=is_syncing, is_training=is_training)
        if self._config.gradients_in_arena:
            # Paddle would put a new tensor in the place of a cleared one: a copy in each hook.
            for parameter in self._tensors.trainable:
                internals.count_as_gradient(parameter)

    def watch(self, output: object) -> None:
        """Let the backward of these outputs begin a pass even if it reaches no parameter."""
        if isinstance(output, paddle.Tensor):
            if not output.stop_gradient and not output.is_leaf:
                # Holds these passes, as long as the graph: the wrapper may be gone before backward().
                output.register_hook(self._on_output_gradient)
        elif isinstance(output, dict):
            for item in output.values():
                self.watch(item)
        elif isinstance(output, (list, tuple)):
            for item in output:
                self.watch(item)

    def _on_output_gradient(self, _: paddle.Tensor) -> None:
        """The backward of an output has begun, or paddle.grad() through it, which is no pass."""
        try:
            if not self.state.is_syncing:
                self.weights.watch_local()
            elif not self.state.is_armed and backward_calls.depth():
                self._arm()
        except BaseException as error:
            self._keep_error(error)

    def _keep_error(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            # Where no pass is under way, its end will not raise it.
            if not self.state.is_armed:
                backward_calls.at_end(self._raise_kept)

    def _raise_kept(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def on_gradient(self, index: int | None) -> None:
        """A parameter's gradient is accumulated; None: that of one with sparse gradients."""
        if self._error is None:
            try:
                self._take(index)
            except BaseException as error:
                self._keep_error(error)

    def _take(self, index: int | None) -> None:
        state = self.state
        if not state.is_syncing:
            if index is not None:
                state.accumulated.add(index)
            return
        if not state.is_armed:
            self._arm()
        if index is None:
            return
        if index in self._at_end or backward_calls.depth() > 1:
            self._always_at_end.add(index)
        if self._is_first or index in self._always_at_end:
            if not self._has_come_again(index):
                self._at_end[index] = None
        else:
            self._hand_over(index)

    def _has_come_again(self, index: int) -> bool:
        if index not in self.state.handed:
            return False
        error = ConfigError(
            f"The gradient of '{self._tensors.names[index]}' came again after it had been handed over.",
            where=self.state.where,
            likely="a layer is used inside and outside of recompute(), for the first time in this pass",
            hint="recompute(..., use_reentrant=False); or do it from the first pass on",
        )
        self.state.refuse(index, error)
        return True

    def _hand_over(self, index: int) -> None:
        """Give the gradient to the reducer, as few Python steps as possible for the usual one."""
        if self._has_come_again(index):
            return
        gradient = internals.gradient_of(self._tensors.trainable[index])
        if gradient is not None and self._config.gradients_in_arena:
            if gradient.data_ptr() != self._pointers[index]:
                if not self._is_right_kind(index, gradient):
                    return
                with paddle.no_grad():
                    paddle.assign(gradient, self._places[index])
                internals.move_memory(gradient, self._places[index])
            self.state.handed[index] = gradient
            self.reducer.mark_ready(index, 0)
            return
        if gradient is None or gradient.dtype is not self._dtypes[index] or not gradient.is_contiguous():
            if not self._is_right_kind(index, gradient):
                return
            assert gradient is not None
            # Its strides differ: from now on it lies in memory as its parameter does.
            with paddle.no_grad():
                internals.move_memory(gradient, gradient.contiguous())
        self.state.handed[index] = gradient
        if self._reduction.takes_pointers:
            self.reducer.mark_ready(index, gradient.data_ptr())
            return
        with paddle.no_grad():
            paddle.assign(gradient, self._places[index])
        self.state.staged.append(index)
        self.reducer.mark_ready(index, 0)

    def _is_right_kind(self, index: int, gradient: paddle.Tensor | None) -> bool:
        if gradient is None:
            got, likely = "no gradient", "another hook of this parameter removed it"
        elif internals.is_sparse(gradient):
            got = "a sparse gradient"
            likely = "embedding(..., sparse=True) as a function: use the layer nn.Embedding(sparse=True)"
        elif gradient.dtype is not self._dtypes[index]:
            got = f"a gradient of {dtype_name(gradient.dtype)}"
            likely = "the model was converted, by .astype() or .to(), after it had been wrapped"
        else:
            return True
        error = ConfigError(
            f"DataParallel cannot average the gradient of '{self._tensors.names[index]}'.",
            where=self.state.where,
            expected=f"a dense gradient of {dtype_name(self._dtypes[index])}",
            got=got,
            likely=likely,
        )
        self.state.refuse(index, error)
        return False

    def _is_in_backward(self) -> bool:
        return backward_calls.depth() > 0

    def _call_at_end(self, end: Callable[[], None]) -> None:
        backward_calls.at_end(end)

    def _has_gradient(self, index: int) -> bool:
        return internals.gradient_of(self._tensors.trainable[index]) is not None

    def _clear_place(self, index: int) -> None:
        self._places[index].zero_()

    def _hash_replica(self, optimizer: Any) -> Sequence[Entry]:
        now, in_step = self._tensors.current_buffers(), self.buffers.in_step
        buffers = {name: buffer for name, buffer in now.items() if name in in_step}
        return hash_model(self._tensors.all_parameters, buffers, optimizer)

    def _tell(self, activity: str) -> None:
        self._link.tell(activity)

    def _prepare_end(self) -> None:
        self._raise_kept()  # the pass stays open; the next forward tells the other ranks

    def _hand_over_rest(self) -> None:
        pending, self._at_end = self._at_end, {}
        self._is_first = self._is_first and not pending
        for index in pending:
            self._hand_over(index)
        super()._hand_over_rest()

    def _forget_interrupted(self) -> None:
        self._error = None
        self._at_end.clear()

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
        state = self.state
        with paddle.no_grad():
            for index in state.staged:
                paddle.assign(self._places[index], state.handed[index])
            if len(state.handed) == len(self._places):
                return
            nobodys = set(self.reducer.globally_unused())
            for index, parameter in enumerate(self._tensors.trainable):
                if index not in state.handed and index not in nobodys:
                    parameter.grad = self._places[index]  # Paddle copies
                    if self._config.gradients_in_arena:
                        internals.move_memory(internals.gradient_of(parameter), self._places[index])

    def _adopt_order(self, order: list[int]) -> None:
        self.is_order_final = True
        agreed = paddle.to_tensor(complete_order(order, len(self._tensors.trainable)), "int32")
        self._link.broadcast([agreed])
        plan = self._make_plan(agreed.tolist())
        if plan == self._plan:
            return
        before, moved = self.reducer, self._gradients_in_places()
        self._of_first = (before.squared_norm(), before.nonfinite())
        self._waited_before_s += before.waited_s
        if not moved:  # the arena is free, so there need never be two
            before.close()
        self._adopt(plan)
        for index, gradient in moved.items():
            with paddle.no_grad():
                paddle.assign(gradient, self._places[index])
            internals.move_memory(gradient, self._places[index])
        if moved:
            before.close()

    def _gradients_in_places(self) -> dict[int, paddle.Tensor]:
        """The gradients that live in the arena."""
        if not self._config.gradients_in_arena:
            return {}
        gradients = map(internals.gradient_of, self._tensors.trainable)
        return {
            index: gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.data_ptr() == self._pointers[index]
        }

    def _adopt(self, plan: Plan) -> None:
        self._plan = plan
        self._reduction: Reduction = self._link.make_reduction(
            plan,
            self._tensors.trainable,
            gradients_in_arena=self._config.gradients_in_arena,
            checks_finite=self._config.nonfinite != "ignore",
        )
        self._places = self._reduction.places
        self._pointers = [place.data_ptr() for place in self._places]
        self._dtypes = [place.dtype for place in self._places]

    def _make_plan(self, order: list[int] | None) -> Plan:
        return plan_buckets(
            self._tensors.specs(),
            bucket_cap_bytes=self._config.bucket_cap_bytes,
            first_bucket_bytes=self._config.first_bucket_bytes,
            order=order,
        )


def _weak_hook(passes: GradientPasses, index: int | None) -> Callable[[], None]:
    """Paddle never lets go of a hook, so the hook must not hold what it belongs to."""
    find = weakref.ref(passes)

    def hook() -> None:
        found = find()
        if found is not None:
            found.on_gradient(index)

    return hook
