"""The weights of micro-batches, for Paddle: hooks that scale gradients before Paddle accumulates them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle

from paceline.paddle import internals
from paceline.paddle.backward import graphs
from paceline.paddle.backward.collectives_in_backward import address_of, find_exchanges
from paceline.reducer.backward.collectives_in_backward import nodes_from
from paceline.reducer.backward.micro_batch_weights import MicroBatchWeights
from paceline.reducer.backward.state import BackwardState, Graph


class PaddleWeights(MicroBatchWeights):
    """See `MicroBatchWeights`."""

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        state: BackwardState,
        keep_error: Callable[[BaseException], None],
        is_foreign: Callable[[int], bool],
    ) -> None:
        super().__init__(state)
        self._parameters = parameters
        self._keep_error = keep_error
        self._is_foreign = is_foreign
        self._handles: list[Any] = []
        self._graph_of: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()

    def is_in_backward(self) -> bool:
        return graphs.calls.depth > 0

    def reaches(self, node: object) -> bool:
        leaves = [internals.grad_node(parameter) for parameter in self._parameters]
        own = {address_of(leaf) for leaf in leaves if leaf is not None}
        return any(address_of(each) in own for each in nodes_from([node], address_of))

    def _mark(self, graph: Graph, output: object) -> bool:
        has_leaf = False
        for tensor in graphs.tensors_in(output):
            if tensor.stop_gradient:
                continue
            if tensor.is_leaf:
                has_leaf = True
            else:  # overwrites the entry of a freed node that had this address
                self._graph_of[address_of(internals.grad_node(tensor))] = graph
        return not has_leaf and not graphs.may_hide_tensors(output)

    def through_gradient(self, graph: Graph, gradient: paddle.Tensor | None) -> paddle.Tensor | None:
        if graph.weight is None or gradient is None or not paddle.is_grad_enabled():
            return None
        needing = gradient
        if gradient.stop_gradient:
            needing = gradient.detach()
            needing.stop_gradient = False
        marked = paddle.assign(needing)
        marked.register_hook(graph.hook)
        self._mark(graph, marked)
        return marked

    def _find_forwards(self, left: Iterable[Graph]) -> set[Graph] | None:
        roots = [internals.grad_node(tensor) for tensor in graphs.calls.roots]
        there = {self._graph_of.get(address_of(node)) for node in nodes_from(roots, address_of)}
        return {graph for graph in left if graph in there}

    def _backward(self) -> int:
        return graphs.calls.number

    def _find_exchanges(self) -> list[str]:
        return find_exchanges(graphs.calls.roots)

    def _install(self) -> None:
        self._handles = [self._register(number) for number in range(len(self._parameters))]

    def _register(self, number: int) -> Any:
        # Paddle registers no hook on a frozen parameter, but keeps the hooks that it has.
        parameter = self._parameters[number]
        is_frozen, parameter.stop_gradient = parameter.stop_gradient, False
        try:
            return parameter.register_hook(_weak_hook(self, number))
        finally:
            parameter.stop_gradient = is_frozen

    def _put_last(self) -> None:
        # Paddle has no list of its hooks, so all of ours are registered again.
        for number, handle in enumerate(self._handles):
            handle.remove()
            self._handles[number] = self._register(number)

    def _shrink(self, factor: float) -> None:
        with paddle.no_grad():
            for index in self._state.accumulated:
                gradient = internals.gradient_of(self._parameters[index])
                if gradient is not None and internals.is_sparse(gradient):
                    internals.scale_rows(gradient, factor)
                elif gradient is not None:
                    gradient.scale_(factor)

    def _call_at_end(self, end: Callable[[], None]) -> None:
        graphs.at_end(end)

    def scale(self, number: int, gradient: paddle.Tensor | None) -> paddle.Tensor | None:
        """Runs before Paddle adds a gradient to a parameter's gradient, and in paddle.grad().

        A `gradient` of None means that backward leaves it undefined. The parameter's accumulated gradient is
        scaled all the same.
        """
        if not graphs.calls.depth or (not self.is_weighing and self._is_foreign(number)):
            return None
        try:
            factor = self._share_of_incoming()
        except BaseException as error:
            self._keep_error(error)
            return None
        if factor == 1.0 or gradient is None:
            return None
        if internals.is_sparse(gradient):
            internals.scale_rows(gradient, factor)
            return gradient
        # A weight of 0 removes a gradient, whatever its values are: 0 * NaN would be NaN.
        return gradient * factor if factor else paddle.zeros_like(gradient)


def _weak_hook(weights: PaddleWeights, number: int) -> Callable[[paddle.Tensor | None], paddle.Tensor | None]:
    find = weakref.ref(weights)

    def hook(gradient: paddle.Tensor | None) -> paddle.Tensor | None:
        found = find()
        return None if found is None else found.scale(number, gradient)

    return hook
