"""What remains to do when a backward is over: hand over gradients that no hook has, leave out those without.

The one idea: before a rank tells how its backward went, each parameter of the plan has been handed over or
left out. Hooks have done it for those that this backward reached. Here are the others: gradients that waited
for the end, that came before in no_sync(), or that stayed from an earlier step; and parameters without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from paceline.errors import ConfigError
from paceline.reducer.backward.front_end import FrontEnd
from paceline.reducer.backward.state import BackwardState
from paceline.reducer.backward_errors import GraphVariety, StaticGraph
from paceline.reducer.frozen import digest_of
from paceline.reducer.protocol import Reducer


@final
class LeftOver:
    """Completes the backward passes of one model.

    Args:
        front_end: What the framework gives.
        state: Where the model is in its backward passes.
        variety: Is told of backward passes in which something was unused.
        static_graph: Where that is promised; it is told what each backward has used.
        allow_unused: Whether a parameter may be without a gradient, and contribute 0.
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
        """Hand over what has waited, and what this backward did not touch; look at all of it again.

        Args:
            reducer: Whose backward it is.
        """
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
            frozen = self._autograd.frozen_among(missing)
            self._hand_over_accumulated(missing, frozen)
            if len(state.handed) < count:
                self._leave_out([index for index in missing if index not in state.handed], frozen, reducer)
        self._gradients.check()

    def hand_over_nothing(self, reducer: Reducer) -> None:
        """In place of `hand_over`, on a rank without data: nothing is unused because of it."""
        if not self._allow_unused:
            for index in range(len(self._names)):
                self._mark_zeros(index, reducer)

    def _used(self) -> set[int]:
        """Parameters that have got gradients since the last backward, and wait for no others'."""
        used = self._state.accumulated.union(self._state.handed).difference(self._tensors.delayed)
        return used.intersection(range(len(self._names)))

    def _take_swapped(self) -> None:
        """Hand over gradients that came without a hook, because the parameter is another tensor now."""
        state = self._state
        for index in self._autograd.find_swapped():
            if index in state.handed:
                continue
            if self._micro_batches.is_used:  # their hooks have not scaled it
                state.refuse(index, swapped(self._names[index], state.where))
            elif self._gradients.exists(index):
                self._gradients.hand_over_rest(index)

    def _hand_over_accumulated(self, missing: Sequence[int], frozen: set[int]) -> None:
        """Hand over gradients that this backward did not touch but that count all the same.

        Those of backward passes in no_sync(); and, where unused parameters are allowed, any gradient that is
        left from before: the others add to theirs, so it must take part in the mean. Not that of a frozen
        parameter, which stays as it is: a rank without data would take its share of the mean away.
        """
        accumulated = self._state.accumulated
        for index in missing:
            counts = index in accumulated or (self._allow_unused and index not in frozen)
            if counts and self._gradients.exists(index):
                self._gradients.hand_over_rest(index)

    def _leave_out(self, missing: Sequence[int], frozen: set[int], reducer: Reducer) -> None:
        """These have no gradient; delayed ones have one of zeros, as in torch."""
        delayed = [index for index in missing if index in self._tensors.delayed]
        if delayed:
            self._gradients.leave_out(delayed)
        for index in delayed:
            self._mark_zeros(index, reducer)
        unused = [index for index in missing if index not in self._tensors.delayed]
        self._gradients.leave_out(unused)
        idle = frozen.intersection(unused)
        if idle:
            if not self._allow_unused:
                self._state.status.frozen = digest_of(sorted(idle))
            # What is left there stays as it is, while their places become zeros.
            self._gradients.leave_buffer(idle)

    def _mark_zeros(self, index: int, reducer: Reducer) -> None:
        self._gradients.clear(index)
        reducer.mark_ready(index, 0)


def swapped(name: str, where: str) -> ConfigError:
    """The error for a parameter that has lost the hooks which weigh its gradient."""
    return ConfigError(
        f"The gradient of '{name}' came unweighted: it is another tensor than when it was wrapped.",
        where=f"{where}, the end of backward; the gradients of this backward are of no use, on any rank",
        likely="torch.utils.swap_tensors(); or .to() or load_state_dict() with "
        "torch.__future__.set_swap_module_params_on_conversion(True)",
        hint="convert and load before wrapping; or wrap `ddp.module` again, on every rank",
        parameter=name,
    )
