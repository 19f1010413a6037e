"""The backward passes of a Paddle layer: detects when a backward begins and ends, and hands gradients over.

A backward begins at the first gradient of a forward's output, so that a rank on which no parameter gets a
gradient ends its backward too. It also begins at the first gradient of a parameter, unless another wrapped
model has the parameter as well. It ends when backward() is over.

In the first backward, gradients are handed over at its end. A parameter whose hook fires more than once in a
backward, or inside an inner backward (reentrant recompute), is handed over at the end of all later backward
passes, when its gradient is complete. So is a parameter with user hooks that Paddle calls after ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import paddle

from paceline import _core
from paceline.errors import ConfigError, PacelineError
from paceline.paddle import internals
from paceline.paddle.backward import graphs
from paceline.paddle.backward.gradients import Gradients
from paceline.paddle.backward.graphs import calls, listen, may_hide_tensors, tensors_in
from paceline.paddle.backward.micro_batch_weights import PaddleWeights
from paceline.paddle.backward.sparse import SparseMeans
from paceline.paddle.model.config import DataParallelConfig
from paceline.paddle.model.gradient_stand_in import Scattered
from paceline.paddle.model.parameters import ManagedTensors
from paceline.paddle.ops import OPS
from paceline.reducer.backward.backward_log import LocalBackward
from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.reducer.backward.front_end_interface import FrontEnd
from paceline.reducer.backward.replica_drift import sampled, sampler
from paceline.reducer.backward.state import RUNNING, BackwardState, EndOfBackward, Graph
from paceline.reducer.buffers import BufferSync
from paceline.reducer.communicator import Communicator
from paceline.sharding.scattered_gradients import refuse_sparse
from paceline.trace.recording import recording


class PaddleAutograd:
    """See `paceline.reducer.backward.front_end_interface.Autograd`.

    Attributes:
        weights: The weights of this rank's micro-batches.
    """

    weights: PaddleWeights

    def __init__(self, tensors: ManagedTensors, state: BackwardState, gradients: Gradients) -> None:
        self._tensors = tensors
        self._state = state
        self._hand_overs = gradients.hand_over
        self._gradients = gradients
        self._error: BaseException | None = None  # the error of a hook, which must not raise
        self._is_closed = self._is_installed = False
        self._shared: set[int] = set()
        self._is_first = True
        self._at_end: dict[int, None] = {}  # to hand over at the end of this backward, in this order
        self._always_at_end: set[int] = set(tensors.delayed)
        self._listen(True)
        self._begins_at_outputs = True

    def install(self) -> None:
        """Called once: Paddle keeps the hooks, and they call the functions that `gradients.hand_over` has at
        the time.
        """
        if not self._is_installed:
            self._is_installed = True
            graphs.watch_backwards()
            listen(self, self._tensors.all_trainable)

    def share(self, indices: set[int]) -> None:
        self._shared = indices

    def scattered_in_place(self) -> Scattered | None:
        scattered = self._gradients.scattered
        if scattered is None or all(internals.stand_in_of(p) is None for p in self._tensors.trainable):
            return None
        return scattered

    def use_static_graph(self, is_static: bool) -> None:
        """Gradients that come several times wait for the end of backward anyway."""

    def close(self) -> None:
        """Paddle keeps the hooks, so they are only switched off."""
        self._is_closed = True
        self._listen(False)

    def begin_forward(self, *, is_syncing: bool, good_backwards: int) -> None:
        """Keep cleared gradients where they are."""
        self._gradients.count_all()

    def watch(self, output: object) -> None:
        state = self._state
        graph = state.graphs.add(
            self._on_output_gradient,
            is_averaged=state.is_forward_averaged,
            is_counted=state.is_forward_counted,
            frozen=self._tensors.frozen_now,
        )
        begins_at_outputs = hides_nothing = not may_hide_tensors(output)
        found = list(tensors_in(output))
        for tensor in found:
            if tensor.stop_gradient:
                continue
            if tensor.is_leaf:
                begins_at_outputs = False
            else:
                # The hook keeps the `BackwardSync` alive as long as the graph, because the wrapper may be
                # dropped before backward().
                tensor.register_hook(graph.hook)
        self._begins_at_outputs = begins_at_outputs
        has_no_backward = hides_nothing and bool(found) and all(tensor.stop_gradient for tensor in found)
        if state.is_forward_counted and has_no_backward:  # for example a sampled action
            state.take_back_forward()
        if self.weights.of_forward is not None:
            self.weights.add_forward(graph, output)

    def watch_local(self, output: object, backward: LocalBackward) -> None:
        def begin(_: object) -> None:
            if calls.depth and (end := backward.begin()) is not None:
                graphs.at_end(end)

        for tensor in tensors_in(output):
            if not tensor.stop_gradient and not tensor.is_leaf:
                tensor.register_hook(begin)

    def _on_output_gradient(self, graph: Graph, gradient: paddle.Tensor | None) -> paddle.Tensor | None:
        """A backward has reached an output, or paddle.grad() has, which is not a backward."""
        try:
            state = self._state
            if not calls.depth:
                return self.weights.through_gradient(graph, gradient) if self.weights.is_used else None
            state.give_up_before(graph)
            if state.is_other(graph):
                state.follow(graph)
                if not state.is_syncing:  # the end of a synchronised backward does this itself
                    graphs.at_end(EndOfBackward(state.unfollow, state.unfollow))
            if self.weights.is_used:
                self.weights.reach(graph)
            if not state.is_syncing:
                if self.weights.is_used:
                    self.weights.begin()
            elif self._is_closed:
                raise ConfigError(
                    "The outputs of this backward are older than the last init_reducer().",
                    where=self._state.where,
                    hint="call init_reducer() between a backward and the next forward",
                )
            else:
                state.graphs.check_open()
                if state.phase < RUNNING:
                    state.arm()
                state.graphs.begin(graph)
        except BaseException as error:
            self.keep_error(error)
        return None

    def _listen(self, is_listening: bool) -> None:
        self._is_listening = is_listening
        self._is_steady = is_listening and not self._is_first  # gradients may be handed over at once

    def keep_error(self, error: BaseException) -> None:
        """Store the exception of a hook, which must not raise, to raise it when backward is over."""
        if self._error is None:
            self._error = error
            self._listen(False)
            # The end of a synchronised backward raises it, too, but this backward may be a local one.
            graphs.at_end(EndOfBackward(self.raise_kept, self._drop_kept))

    def raise_kept(self) -> None:
        error = self._error
        if error is not None:
            self._drop_kept()
            raise error

    def _drop_kept(self) -> None:
        self._error = None
        self._listen(not self._is_closed)

    def on_gradient(self, index: int) -> None:
        state = self._state
        is_running = state.phase >= RUNNING and state.is_syncing
        if self._is_steady and is_running and index not in self._always_at_end:
            try:
                if calls.depth == 1:
                    self._hand_overs[index]()
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
        state = self._state
        if not state.is_syncing:
            state.accumulated.add(index)
            self._gradients.check_cleared(index)
            return
        if state.phase < RUNNING:
            if self.is_foreign(index):
                return
            state.arm()
        if self._is_first or index in self._always_at_end or calls.depth > 1:
            self._postpone(index)
        else:
            self._hand_overs[index]()

    def is_foreign(self, index: int) -> bool:
        return self._is_closed or (index in self._shared and self._begins_at_outputs)

    def _postpone(self, index: int) -> None:
        """Hand the gradient over at the end of this backward; and of all later ones, if it came again or in
        an inner backward.
        """
        if index in self._at_end or calls.depth > 1:
            self._always_at_end.add(index)
        if index in self._state.handed:
            self._hand_overs[index]()  # records the error that it came again
        else:
            self._at_end[index] = None

    def note_hook_of_others(self, parameter: paddle.Tensor) -> None:
        """Hand the gradient over at the end of backward, because another hook is called after ours and may
        change it.
        """
        self._always_at_end.update(i for i, each in enumerate(self._tensors.trainable) if each is parameter)

    def is_in_backward(self) -> bool:
        return calls.depth > 0

    def backward(self) -> int:
        """Always the same, because a recomputed block's backward ends with the one around it."""
        return 0

    def await_drop(self, is_dropped: Callable[[], bool]) -> None:
        """Nothing to wait for: Paddle runs a backward in the thread of its caller."""

    def frozen_among(self, indices: Iterable[int]) -> set[int]:
        trainable = self._tensors.trainable
        return {index for index in indices if trainable[index].stop_gradient}

    def find_swapped(self) -> list[int]:
        """A parameter of Paddle always stays the same tensor."""
        return []

    def prepare(self) -> None:
        self._state.handed.begin()
        if (scattered := self._gradients.scattered) is not None:
            scattered.forget()

    def at_end(self, end: Callable[[], None]) -> None:
        graphs.at_end(end, before=self._hand_over_postponed)

    def _hand_over_postponed(self) -> None:
        """Runs before any wrapped model ends its backward, so that no mean becomes part of another model's
        gradient.
        """
        try:
            if self._error is None:
                pending, self._at_end = self._at_end, {}
                if pending:
                    self._is_first = False
                    self._listen(self._is_listening)
                for index in pending:
                    self._hand_overs[index]()
        except BaseException as error:
            self.keep_error(error)

    complete = None  # `_hand_over_postponed` does it

    def note_error(self, error: PacelineError) -> None:
        if (scattered := self._gradients.scattered) is not None:
            scattered.give_up()

    def after_means(self) -> None: ...

    def learn(self) -> None: ...

    def forget(self) -> None:
        self._drop_kept()
        self._at_end.clear()


PaddleBackwardSync: TypeAlias = BackwardSync[PaddleAutograd]


def make_sync(
    tensors: ManagedTensors, communicator: Communicator[paddle.Tensor], config: DataParallelConfig
) -> PaddleBackwardSync:
    """Collective."""
    state = BackwardState(communicator.rank, communicator.world_size)
    gradients = Gradients(
        tensors,
        state,
        communicator.rank,
        live_in_buffer=config.gradients_in_buffer,
        reduce_dtype=config.precision.reduce_dtype,
        widens=config.virtual_ranks is not None,
    )
    if config.scatters:
        refuse_sparse(OPS.names, list(tensors.sparse))
    autograd = PaddleAutograd(tensors, state, gradients)
    autograd.weights = PaddleWeights(tensors.all_trainable, state, autograd.keep_error, autograd.is_foreign)
    front_end = FrontEnd(
        tensors,
        gradients,
        SparseMeans(tensors, communicator),
        autograd,
        autograd.weights,
        BufferSync(tensors, communicator, config, OPS),
        _core.IterationNotes(None, sampler(OPS, sampled(OPS, tensors.trainable))),
        OPS,
    )
    backward_sync = BackwardSync(front_end, state, communicator, config)
    if recording.keeps_all:
        OPS.note_steps()
    return backward_sync
