"""Weights of micro-batches for torch: hooks that scale gradients before autograd accumulates them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline import _core
from paceline.reducer.backward.collectives_in_backward import nodes_from
from paceline.reducer.backward.micro_batch_weights import MicroBatchWeights
from paceline.reducer.backward.state import RUNNING, BackwardState, Graph
from paceline.torch.backward.collectives_in_backward import find_exchanges
from paceline.torch.backward.graphs import (
    BACKWARD,
    GRAD,
    may_hide_tensors,
    roots_of_backward,
    running_call,
    tensors_in,
)
from paceline.torch.backward.last_hooks import taking_hooks

_FORWARDS = "paceline.forwards"  # key in a node's metadata: the graphs of forwards that returned its output


class TorchWeights(MicroBatchWeights):
    """`MicroBatchWeights` for torch."""

    def __init__(self, parameters: Sequence[torch.Tensor], state: BackwardState) -> None:
        super().__init__(state)
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        # One object for each parameter, by which `HookOrder` finds it again.
        self._hooks = [functools.partial(self._scale, index) for index in range(len(parameters))]
        self._not_last: Callable[[], list[int]]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch_local(self, graph: Graph, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a replacement for the gradient of an output of a forward in no_sync(); None: no change."""
        call = BACKWARD if self.is_open else running_call()
        if call is GRAD:
            return self.through_gradient(graph, gradient)
        self.reach(graph)
        if call is BACKWARD:
            self.begin()
        return None

    def is_in_backward(self) -> bool:
        return running_call() is not GRAD

    def reaches(self, node: object) -> bool:
        own = {id(parameter) for parameter in self._parameters}
        return any(id(getattr(each, "variable", None)) in own for each in nodes_from([node]))

    def _mark(self, graph: Graph, output: object) -> bool:
        has_leaf = False
        for tensor in tensors_in(output):
            node: Any = tensor.grad_fn
            if node is not None:
                node.metadata.setdefault(_FORWARDS, []).append(graph)
            elif tensor.requires_grad:
                has_leaf = True
        return not has_leaf and not may_hide_tensors(output)

    def through_gradient(self, graph: Graph, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if graph.weight is None or gradient is None or not torch.is_grad_enabled():
            return None
        needing = gradient if gradient.requires_grad else gradient.detach().requires_grad_()
        marked = needing.view_as(needing)
        marked.register_hook(graph.hook)  # type: ignore[no-untyped-call]
        self._mark(graph, marked)
        return marked

    def _find_forwards(self, left: Iterable[Graph]) -> set[Graph] | None:
        if not (roots := roots_of_backward()):
            return None
        there = {graph for node in nodes_from(roots) for graph in node.metadata.get(_FORWARDS, ())}
        return there.intersection(left)

    def _backward(self) -> int:
        return torch._C._current_graph_task_id()

    def _find_exchanges(self) -> list[str]:
        return find_exchanges(roots_of_backward())

    def _install(self) -> None:
        self._handles = [self._register(index) for index in range(len(self._parameters))]
        self._not_last = _core.HookOrder(list(self._parameters), self._hooks, "_backward_hooks").not_last

    def _register(self, index: int) -> RemovableHandle:
        parameter = self._parameters[index]
        with taking_hooks(parameter):
            return parameter.register_hook(self._hooks[index])  # type: ignore[no-untyped-call, no-any-return]

    def _put_last(self) -> None:
        for index in self._not_last():
            self._handles[index].remove()
            self._handles[index] = self._register(index)

    def _shrink(self, factor: float) -> None:
        accumulated = (self._parameters[index].grad for index in sorted(self._state.accumulated))
        gradients = [gradient for gradient in accumulated if gradient is not None]
        if gradients:  # else the user has cleared them
            with torch.no_grad():
                torch._foreach_mul_(gradients, factor)

    def _call_at_end(self, end: Callable[[], None]) -> None:
        Variable._execution_engine.queue_callback(end)

    def _scale(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """A hook that runs before autograd adds a gradient to .grad.

        The gradient is None if backward leaves it undefined. The value in .grad is weighted all the same.
        """
        if index in self.shared and not self.is_weighing:
            return None
        if not (self.is_open or self._state.phase >= RUNNING) and running_call() is GRAD:
            return None
        share = self._share_of_incoming()
        if share == 1.0 or gradient is None:
            return None
        # A weight of 0 removes a gradient, whatever its values: 0 * NaN would be NaN.
        return gradient * share if share else torch.zeros_like(gradient)
