"""One backward pass after the other, from the first gradient to the last mean.

A pass begins at the first gradient, or at that of an output of forward, so that a rank on which no parameter
gets a gradient ends its pass too. It ends when backward() is over: this rank waits for the others and judges.

In the first pass, gradients are handed over at its end. What fires more than once in it, or inside an inner
backward (reentrant recompute), is handed over at the end of all further passes, when it is complete.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable

import paddle

from paceline.errors import ConfigError
from paceline.paddle import backward_calls, internals
from paceline.paddle.arena import dtype_name, places
from paceline.paddle.config import DataParallelConfig
from paceline.paddle.peers import Peers
from paceline.paddle.sparse import average_rows
from paceline.paddle.tensors import ManagedTensors
from paceline.paddle.values import broadcast_values
from paceline.reducer.host import make_host_reducer
from paceline.reducer.pass_state import PassState
from paceline.reducer.plan import Plan, complete_order, plan_buckets
from paceline.reducer.protocol import Outcome
from paceline.reducer.verdict import Judge, give_up_interrupted


class GradientPasses:
    """Averages the gradients of one model in each backward.

    Args:
        tensors: The model's.
        peers: The ranks that train it.
        config: Of the wrapped model.
    """

    def __init__(self, tensors: ManagedTensors, peers: Peers, config: DataParallelConfig) -> None:
        self.state = PassState()
        self._tensors = tensors
        self._peers = peers
        self._config = config
        self._judge = Judge(
            tensors.names, peers.world_size, allow_unused=config.allow_unused, nonfinite=config.nonfinite
        )
        self._error: BaseException | None = None  # of a hook, which must not raise
        self._waited_before_s = 0.0
        self._pass_number = 1
        self._is_first = True
        self._at_end: dict[int, None] = {}  # to be handed over at the end of this pass, in this order
        self._always_at_end: set[int] = set()
        self._adopt(self._make_plan(None))
        # With one bucket for each kind of parameter, any order is as good as any other.
        self._is_order_final = len(self._plan.buckets) <= len(self._plan.sections)
        backward_calls.watch()
        for index, parameter in enumerate(tensors.trainable):
            internals.on_gradient(parameter, _weak_hook(self, index))
        for parameter in tensors.sparse.values():
            internals.on_gradient(parameter, _weak_hook(self, None))

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent waiting for the others at the end of backward, in all passes."""
        return self._waited_before_s + self.reducer.waited_s

    def begin_forward(self, *, is_syncing: bool, is_training: bool) -> None:
        """Note a forward whose gradients will be needed.

        Raises:
            ForkedError: This process is a forked child of the one that wrapped the model.
            SkippedPassError: The backward before this forward ended in an exception, on this rank.
        """
        state = self.state
        state.check_process()
        if state.is_armed:
            self._give_up_interrupted()
        state.is_syncing = is_syncing
        self._say("in forward of")
        # Forwards in eval mode often have no backward, on some ranks only; such a rank skips nothing.
        if is_syncing and is_training:
            state.forwards += 1

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
        if self.state.is_syncing and not self.state.is_armed and backward_calls.depth():
            try:
                self._arm()
            except BaseException as error:
                self._error = error

    def on_gradient(self, index: int | None) -> None:
        """A parameter's gradient is accumulated; None: that of one with sparse gradients."""
        if self._error is None:
            try:
                self._take(index)
            except BaseException as error:
                self._error = error

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
            self._check_not_handed(index)
            self._at_end[index] = None
        else:
            self._hand_over(index)

    def _arm(self) -> None:
        self.state.check_process()
        self.state.is_armed = True
        backward_calls.at_end(self._end)
        self._say("in backward of")

    def _check_not_handed(self, index: int) -> None:
        if index in self.state.handed:
            raise ConfigError(
                f"The gradient of '{self._tensors.names[index]}' came again after it had been handed over.",
                likely="a layer is used inside and outside of recompute(), for the first time in this pass",
                hint="recompute(..., use_reentrant=False); or do it from the first pass on",
            )

    def _hand_over(self, index: int) -> None:
        """Give the gradient to the reducer, as few Python steps as possible for the usual one."""
        self._check_not_handed(index)
        gradient = internals.gradient_of(self._tensors.trainable[index])
        if gradient is not None and self._config.gradients_in_arena:
            if gradient.data_ptr() != self._pointers[index]:
                self._check_kind(index, gradient)
                with paddle.no_grad():
                    paddle.assign(gradient, self._places[index])
                internals.move_memory(gradient, self._places[index])
            self.state.handed[index] = gradient
            self.reducer.mark_ready(index, 0)
            return
        if gradient is None or gradient.dtype is not self._dtypes[index] or not gradient.is_contiguous():
            self._check_kind(index, gradient)
            assert gradient is not None
            # Its strides differ: from now on it lies in memory as its parameter does.
            with paddle.no_grad():
                internals.move_memory(gradient, gradient.contiguous())
        self.state.handed[index] = gradient
        self.reducer.mark_ready(index, gradient.data_ptr())

    def _check_kind(self, index: int, gradient: paddle.Tensor | None) -> None:
        if gradient is None:
            got, likely = "no gradient", "another hook of this parameter removed it"
        elif internals.is_sparse(gradient):
            got = "a sparse gradient"
            likely = "embedding(..., sparse=True) as a function: use the layer nn.Embedding(sparse=True)"
        elif gradient.dtype is not self._dtypes[index]:
            got = f"a gradient of {dtype_name(gradient.dtype)}"
            likely = "the model was converted, by .astype() or .to(), after it had been wrapped"
        else:
            return
        raise ConfigError(
            f"DataParallel cannot average the gradient of '{self._tensors.names[index]}'.",
            expected=f"a dense gradient of {dtype_name(self._dtypes[index])}",
            got=got,
            likely=likely,
        )

    def _end(self) -> None:
        """The end of this rank's backward: wait for the others, judge, and bring the means home."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error  # the pass stays open; the next forward tells the other ranks
        state = self.state
        try:
            for index in self._at_end:
                self._hand_over(index)
            if len(state.handed) < len(self._tensors.trainable):
                self._hand_over_accumulated()
            outcome = Outcome(self.reducer.finish(state.forwards, self._config.allow_unused))
            if outcome:
                self._judge.judge(outcome, self.reducer)
            self._bring_home()
            order = None if self._is_order_final else list(state.handed)
        finally:
            self._begin_next()
        self._is_first = False
        for name, parameter in self._tensors.sparse.items():
            average_rows(parameter, name, self._peers.host_group)
        if order is not None:
            self._adopt_order(order)
        if self._config.broadcast_buffers and self._tensors.buffers:
            broadcast_values(self._tensors.current_buffers(), self._peers.host_group)

    def _begin_next(self) -> None:
        self.state.begin_next()
        self._at_end.clear()
        self._say("after backward of")
        self._pass_number += 1

    def _say(self, doing: str) -> None:
        """Let the errors of other ranks tell what this one was doing."""
        self._peers.host_group.set_activity(f"{doing} pass {self._pass_number}")

    def _hand_over_accumulated(self) -> None:
        """Hand over gradients that this backward did not touch but that count all the same.

        Those of no_sync() passes; and, where unused parameters are allowed, any gradient that is left
        from before: the others add to theirs, so it must take part in the mean.
        """
        state = self.state
        for index, parameter in enumerate(self._tensors.trainable):
            counts = index in state.accumulated or self._config.allow_unused
            if index not in state.handed and counts and internals.gradient_of(parameter) is not None:
                internals.count_as_gradient(parameter)
                self._hand_over(index)

    def _bring_home(self) -> None:
        """Make every parameter's gradient the mean, where the reducer has not done so itself."""
        state = self.state
        with paddle.no_grad():
            if len(state.handed) == len(self._places):
                return
            nobodys = set(self.reducer.globally_unused())
            for index, parameter in enumerate(self._tensors.trainable):
                if index not in state.handed and index not in nobodys:
                    parameter.grad = self._places[index]  # Paddle copies
                    if self._config.gradients_in_arena:
                        internals.move_memory(internals.gradient_of(parameter), self._places[index])

    def _adopt_order(self, order: list[int]) -> None:
        """Plan anew, in the order that rank 0 saw; once, after the first good pass. Collective."""
        self._is_order_final = True
        agreed = array("i", complete_order(order, len(self._tensors.trainable)))
        address, count = agreed.buffer_info()
        self._peers.host_group.broadcast(address, count * agreed.itemsize, 0)
        plan = self._make_plan(agreed.tolist())
        if plan == self._plan:
            return
        before, moved = self.reducer, self._gradients_in_places()
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
        in_arena = self._config.gradients_in_arena
        self.reducer = make_host_reducer(self._peers.host_group, plan, gradients_in_arena=in_arena)
        self._places = places(plan, self._tensors.trainable, self.reducer.arena_pointer, self.reducer)
        self._pointers = [place.data_ptr() for place in self._places]
        self._dtypes = [place.dtype for place in self._places]

    def _give_up_interrupted(self) -> None:
        """End the pass that an exception broke off, so that all ranks learn of it and can go on."""
        self._error = None
        error = give_up_interrupted(self.reducer, allow_unused=self._config.allow_unused)
        self._begin_next()
        if error is not None:
            raise error

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
