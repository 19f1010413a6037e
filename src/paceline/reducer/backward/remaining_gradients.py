"""Gradients that no hook has handed over when a backward ends: unused, frozen, or accumulated earlier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from paceline.reducer.backward.front_end_interface import FrontEnd
from paceline.reducer.backward.state import BackwardState
from paceline.reducer.backward.static_graph import GraphVariety, StaticGraph
from paceline.reducer.backward_errors import swapped_error
from paceline.reducer.backward_reports import digest_of
from paceline.reducer.reducer_interface import Reducer


@final
class RemainingGradients:
    """Hands over the gradients that no hook has handed over, and leaves out parameters that have none.

    Such gradients were deferred to the end, came in no_sync() before, or stayed from an earlier step.
    """

    def __init__(
        self,
        front_end: FrontEnd[Any],
        state: BackwardState,
        variety: GraphVariety,
        static_graph: StaticGraph | None,
        *,
        allow_unused: bool,
    ) -> None:
        self._tensors, self._names = front_end.tensors, front_end.tensors.names
        self._gradients, self._autograd = front_end.gradients, front_end.autograd
        self._micro_batches = front_end.micro_batches
        self._state = state
        self._variety, self._static_graph = variety, static_graph
        self._allow_unused = allow_unused

    def hand_over(self, reducer: Reducer) -> None:
        state = self._state
        if (complete := self._autograd.complete) is not None:
            complete()
        count = len(self._names)
        if len(state.handed) < count:
            self._take_swapped()
        if self._static_graph is not None:
            state.status.graph_changed = self._static_graph.has_changed(self._used())
        elif len(state.handed) < count:
            self._variety.note(self._used)
        if len(state.handed) < count:
            missing = [index for index in range(count) if index not in state.handed]
            frozen = state.graphs.frozen()
            if frozen is None:
                frozen = self._tensors.frozen_now  # as of the last forward
            # A parameter frozen after its forward may be unused too, for example in a recomputed block.
            frozen = frozen | self._autograd.frozen_among(missing)
            self._hand_over_accumulated(missing, frozen)
            if len(state.handed) < count:
                self._leave_out([index for index in missing if index not in state.handed], frozen, reducer)
        self._gradients.check()

    def hand_over_nothing(self, reducer: Reducer) -> None:
        """Hand over zeros on a rank without data, so that it makes no parameter count as unused."""
        if not self._allow_unused:
            for index in range(len(self._names)):
                self._mark_zeros(index, reducer)

    def _used(self) -> set[int]:
        used = self._state.accumulated.union(self._state.handed).difference(self._tensors.delayed)
        return used.intersection(range(len(self._names)))

    def _take_swapped(self) -> None:
        """Hand over gradients that came without a hook, because the parameter is a different tensor now."""
        state = self._state
        for index in self._autograd.find_swapped():
            if index in state.handed:
                continue
            if self._micro_batches.is_used:  # no hook has scaled this gradient
                state.refuse(index, swapped_error(self._names[index], state.where))
            elif self._gradients.exists(index):
                self._gradients.hand_over_rest(index)

    def _hand_over_accumulated(self, missing: Sequence[int], frozen: frozenset[int]) -> None:
        """Hand over gradients that this backward did not touch but that count in the mean.

        These are gradients of backward passes in no_sync(). If unused parameters are allowed, they include
        any gradient that is left from before: other ranks add to theirs, so this one must take part in the
        mean.
        """
        accumulated = self._state.accumulated
        for index in missing:
            counts = index in accumulated or (self._allow_unused and index not in frozen)
            if counts and self._gradients.exists(index):
                self._gradients.hand_over_rest(index)

    def _leave_out(self, missing: Sequence[int], frozen: frozenset[int], reducer: Reducer) -> None:
        """Leave out parameters without a gradient; delayed ones get zeros, as in torch.

        The gradient left of a frozen parameter stays as it is if no rank hands it over. It is not averaged
        then, because a rank without data would contribute zeros to the mean.
        """
        delayed = [index for index in missing if index in self._tensors.delayed]
        if delayed:
            self._gradients.leave_out(delayed)
        for index in delayed:
            self._mark_zeros(index, reducer)
        unused = [index for index in missing if index not in self._tensors.delayed]
        self._gradients.leave_out(unused)
        if idle := frozen.intersection(unused):
            # Their gradients keep their values, while their places in the buffer get zeros or a copy.
            self._gradients.leave_buffer(idle)
            if self._allow_unused:
                self._gradients.count_unused(idle)
            else:  # either no rank has used them, or the backward is void
                self._state.status.frozen = digest_of(sorted(idle))

    def _mark_zeros(self, index: int, reducer: Reducer) -> None:
        self._gradients.clear(index)
        reducer.mark_ready(index, 0)
