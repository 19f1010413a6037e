"""Where the backward of a torch module begins and ends in autograd, and the parts that it is made of.

A backward begins at the first hook that fires: that of a parameter, or that of an output of forward. Outputs
have hooks so that a rank on which no parameter gets a gradient ends its backward, too. The first hook queues
the end of the backward in autograd's engine, which calls it when the backward is over. `reducer.backward` has
what happens there.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch.autograd import Variable, profiler

from paceline import _core
from paceline.errors import PacelineError
from paceline.reducer.backward.backward_log import LocalBackward
from paceline.reducer.backward.backward_sync import BackwardSync
from paceline.reducer.backward.front_end_interface import FrontEnd
from paceline.reducer.backward.replica_drift import sampled, sampler, turns_of
from paceline.reducer.backward.state import INTERRUPTED, RUNNING, BackwardState, EndOfBackward, Graph
from paceline.reducer.buffers import BufferSync
from paceline.reducer.communicator import Communicator
from paceline.sharding.scattered_gradients import refuse_sparse
from paceline.torch.backward.accumulated import separate_accumulated
from paceline.torch.backward.deferred_gradients import DeferredGradients
from paceline.torch.backward.direct_gradients import DirectGradients
from paceline.torch.backward.gradient_hooks import SharedGradients
from paceline.torch.backward.gradients import Gradients
from paceline.torch.backward.graphs import (
    BACKWARD,
    BACKWARD_OF_SOME,
    GRAD,
    UNKNOWN,
    has_no_backward,
    inputs_of_grad,
    running_call,
    tensors_in,
)
from paceline.torch.backward.last_hooks import LastHooks
from paceline.torch.backward.micro_batch_weights import TorchWeights
from paceline.torch.backward.optimizer_in_backward import Steppers, step_in_backward, take_over_optimizers
from paceline.torch.backward.sampled_times import SampledTimes, profiled
from paceline.torch.backward.sparse import SparseMeans
from paceline.torch.backward.storage_uses import uses_of_storages
from paceline.torch.model.config import DDPConfig
from paceline.torch.model.gradient_stand_in import Scattered, ScatteredGradient
from paceline.torch.model.parameters import HAS_EXCHANGE_API, ManagedTensors
from paceline.torch.model.torch_compile import untraced
from paceline.torch.ops import OPS
from paceline.trace.recording import recording

_DROPPED_WITHIN_S = 5.0  # autograd's thread needs the GIL to drop the end of a backward that raised
_LOOK_S = 0.0005


class ErrorNote:
    """The last Paceline error that a wrapper or one of its backwards raised."""

    text = ""

    def add(self, error: PacelineError) -> None:
        self.text = f"{type(error).__name__}: {error}"


class TorchAutograd:
    """torch's `paceline.reducer.backward.front_end_interface.Autograd`."""

    def __init__(
        self,
        tensors: ManagedTensors,
        state: BackwardState,
        gradients: Gradients,
        weights: TorchWeights,
        buffers: BufferSync,
        notes: _core.IterationNotes,
        *,
        is_static: bool,
        is_alone: bool,
    ) -> None:
        self.times = SampledTimes(is_timing=tensors.device_kinds == {"cpu"})
        self.errors = ErrorNote()
        self._tensors = tensors
        self._state = state
        self._gradients = gradients
        self._weights = weights
        self._buffers = buffers
        self._direct = DirectGradients(lambda: notes.writes, state.where, is_alone=is_alone)
        self._has_backwards = False
        self._shared: set[int] = set()
        self._shared_gradients = SharedGradients(state)
        self._has_begun = False
        self._in_backward: Steppers = []
        # Graphs that a backward(inputs=...) has reached; perhaps it computes no gradient of a parameter.
        self._reached: list[tuple[int, weakref.ref[Graph]]] = []
        self._last_hooks: LastHooks | None = None
        self._deferred: DeferredGradients | None
        self.complete: Callable[[], None] | None
        self._make_deferred(is_static)

    def scattered_in_place(self) -> Scattered | None:
        """The scattered gradients, if the `.grad` of any parameter is a stand-in now."""
        is_there = any(type(parameter.grad) is ScatteredGradient for parameter in self._tensors.trainable)
        return self._gradients.scattered if is_there else None

    def use_static_graph(self, is_static: bool) -> None:
        self._make_deferred(is_static)
        self.install()

    def _make_deferred(self, is_static: bool) -> None:
        hand_over, delayed = self._gradients.hand_over_rest, self._tensors.delayed
        if is_static or delayed:
            self._deferred = DeferredGradients(
                self._state, hand_over, delayed, is_learning=is_static, part=self._separate
            )
            self.complete = self._deferred.end_backward
        else:
            self._deferred = self.complete = None

    def install(self) -> None:
        self._remove_hooks()
        deferred, trainable = self._deferred, self._tensors.trainable
        registered = [
            deferred.hook(index) if deferred is not None and deferred.is_late(index) else hook
            for index, hook in enumerate(self._gradients.hooks)
        ]
        for index in self._shared:
            registered[index] = self._shared_gradients.hook(index, registered[index])
        if deferred is not None and self._tensors.trigger is not None:
            registered[self._tensors.trigger] = deferred.with_trigger(registered[self._tensors.trigger])
        # Set before register(), which a signal handler may interrupt.
        self._last_hooks = LastHooks(trainable, registered)
        self._last_hooks.register()
        self._not_last = self._last_hooks.not_last
        own = self._gradients.in_own_memory()
        self._state.handed.watch(list(trainable), "grad", "_version", uses_of_storages(), own)

    def share(self, indices: set[int]) -> None:
        self._shared = indices
        if self._last_hooks is not None:
            self.install()

    def close(self) -> None:
        self._weights.close()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        if self._last_hooks is not None:
            self._last_hooks.remove()

    def _put_last(self, moved: Sequence[int]) -> None:
        assert self._last_hooks is not None
        self._last_hooks.put_last(moved)

    def begin_forward(self, *, is_syncing: bool, good_backwards: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._in_backward = take_over_optimizers(self._tensors.trainable)
        self.check_direct_step()
        if not is_syncing:
            return
        self._has_backwards = good_backwards > 0
        if good_backwards >= self.times.next_backward:
            self.times.begin_forward(good_backwards)
        if self._state.phase < RUNNING and (moved := self._not_last()):
            self._put_last(moved)
        if self._buffers.hook is not None:
            self._buffers.hook.before_forward(dict(self._tensors.current_buffers()))

    def check_direct_step(self) -> None:
        """Called before Paceline's own collectives, which would count as collectives of the program."""
        if self._direct.returned is not None:
            if self._state.accumulated:  # by a backward in no_sync()
                self._direct.forget()
            else:
                self._direct.check()

    def watch(self, output: object) -> None:
        if self._buffers.hook is not None and self._state.is_forward_averaged:
            self._buffers.hook.after_forward(dict(self._tensors.current_buffers()))
        state = self._state
        graph = state.graphs.add(
            self._on_output_gradient,
            is_averaged=state.is_forward_averaged,
            is_counted=state.is_forward_counted,
            frozen=self._tensors.frozen_now,
        )
        is_watched = False
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(graph.hook)  # type: ignore[no-untyped-call]
                is_watched = True
        # An output without a backward: a sampled action, for example.
        if not is_watched and state.is_forward_counted and has_no_backward(output):
            state.take_back_forward()
        if self._weights.of_forward is not None:
            self._weights.add_forward(graph, output)

    def watch_local(self, output: object, backward: LocalBackward) -> None:
        @untraced
        def begin(_: object) -> None:
            if running_call() is BACKWARD and (end := backward.begin()) is not None:
                Variable._execution_engine.queue_callback(functools.partial(_call, end))

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    @untraced
    def _on_output_gradient(self, graph: Graph, gradient: torch.Tensor | None) -> torch.Tensor | None:
        state = self._state
        if state.phase is INTERRUPTED and running_call() is not GRAD:
            state.give_up_before(graph)
        if state.is_other(graph) and running_call() is not GRAD:
            state.follow(graph)
            if not state.is_syncing:  # a synchronised backward queues its own end
                end = EndOfBackward(state.unfollow, state.unfollow)
                Variable._execution_engine.queue_callback(functools.partial(_call, end))
        if not state.is_syncing:
            self._separate_accumulated()
            return self._weights.watch_local(graph, gradient) if self._weights.is_used else None
        call = BACKWARD if state.phase >= RUNNING else running_call()
        if call in (BACKWARD, UNKNOWN):
            state.graphs.check_open()
            if self._weights.is_used:
                self._weights.reach(graph)
            if call is BACKWARD and state.phase < RUNNING:
                state.arm()  # first: any error from now on interrupts the backward
            state.graphs.begin(graph)
        elif call is GRAD:
            if graph.is_averaged and any(self._tensors.is_trained_here(t) for t in inputs_of_grad()):
                self._direct.note_call(has_backwards=self._has_backwards)
            if self._weights.is_used:
                return self._weights.through_gradient(graph, gradient)
        elif call is BACKWARD_OF_SOME:
            self._reached.append((self.backward(), weakref.ref(graph)))
            if self._weights.is_used:
                self._weights.reach(graph)
        return None

    def _separate_accumulated(self) -> None:
        if self._state.accumulated:
            self._separate(list(self._state.accumulated))
        self._state.handed.begin()

    def _separate(self, indices: list[int]) -> None:
        separate_accumulated(self._tensors.trainable, indices, self._state.handed.shared_among(indices))

    def is_in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def backward(self) -> int:
        return torch._C._current_graph_task_id()

    def await_drop(self, is_dropped: Callable[[], bool]) -> None:
        if self._gradients.is_on_host:
            return
        until_s = time.monotonic() + _DROPPED_WITHIN_S
        while not is_dropped() and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    @untraced
    def prepare(self) -> None:
        self._direct.returned = None
        self._separate_accumulated()
        if (scattered := self._gradients.scattered) is not None:
            scattered.forget()
        if self._reached:
            reached, self._reached = self._reached, []
            for backward, find in reached:
                if backward == self.backward() and (graph := find()) is not None:
                    self._state.graphs.begin(graph)

    def at_end(self, end: Callable[[], None]) -> None:
        if self.times.is_begun and not self._state.ends_by_hand:  # by hand, the caller chooses when it ends
            end = self.times.timed(end, self._gradients.reduction.reducer)
        if profiler._is_profiler_enabled:
            end = profiled(end)
        Variable._execution_engine.queue_callback(functools.partial(_call, end))
        if moved := self._not_last():  # hooks were registered since forward
            self._put_last(moved)
        if self._shared:
            self._shared_gradients.begin_backward()

    def frozen_among(self, indices: Iterable[int]) -> set[int]:
        trainable = self._tensors.trainable
        return {index for index in indices if not trainable[index].requires_grad}

    def find_swapped(self) -> list[int]:
        return [] if self._last_hooks is None else self._last_hooks.find_swapped()

    def raise_kept(self) -> None:
        """Nothing to do: torch's hooks raise where they are called."""

    def note_error(self, error: PacelineError) -> None:
        self.errors.add(error)
        if (scattered := self._gradients.scattered) is not None:
            scattered.give_up()

    def after_means(self) -> None:
        if self._in_backward:
            step_in_backward(self._in_backward)

    def learn(self) -> None:
        if self._deferred is not None and self._deferred.learn():
            self.install()
            self._deferred.end_learning()  # if install() was interrupted, the next call of learn() repeats it

    def forget(self) -> None:
        if self._deferred is not None:
            self._deferred.forget()
        self._reached.clear()


TorchBackwardSync: TypeAlias = BackwardSync[TorchAutograd]


def make_sync(
    tensors: ManagedTensors, communicator: Communicator[torch.Tensor], config: DDPConfig
) -> TorchBackwardSync:
    """Collective."""
    state = BackwardState(communicator.rank, communicator.world_size)
    gradients = Gradients(tensors, state, config, communicator.rank)
    if config.scatters:
        refuse_sparse(OPS.names, [tensors.names[index] for index in sorted(tensors.sparse)])
    weights = TorchWeights(tensors.trainable, state)
    sparse = [(index, tensors.trainable[index]) for index in sorted(tensors.sparse)]
    buffers, notes = BufferSync(tensors, communicator, config, OPS), _make_notes(tensors.trainable)
    autograd = TorchAutograd(
        tensors,
        state,
        gradients,
        weights,
        buffers,
        notes,
        is_static=config.static_graph,
        is_alone=communicator.world_size == 1,
    )
    front_end = FrontEnd(
        tensors,
        gradients,
        SparseMeans(sparse, communicator),
        autograd,
        weights,
        buffers,
        notes,
        OPS,
    )
    backward_sync = BackwardSync(front_end, state, communicator, config)
    if recording.keeps_all:
        OPS.note_steps()
    return backward_sync


def _make_notes(parameters: Sequence[torch.Tensor]) -> _core.IterationNotes:
    counted = [parameters[0], parameters[len(parameters) // 2], parameters[-1]]
    places = sampled(OPS, parameters)
    if HAS_EXCHANGE_API:
        looked_at, begins, lengths = (list(each) for each in zip(*places)) if places else ([], [], [])
        return _core.IterationNotes(counted, "_version", looked_at, begins, lengths, turns_of(places))
    return _core.IterationNotes(lambda: sum(each._version for each in counted), sampler(OPS, places))


@untraced
def _call(end: Callable[[], None]) -> None:
    end()
