"""Gradients that are handed over later than when their hook first fires, because they are not complete then.

There are two cases. The gradients of delay_all_reduce_named_params wait for that of param_to_hook_all_reduce.
With static_graph=True, all gradients of the first backward wait for its end. It shows which gradients come
several times (those of a layer in two reentrant checkpoints); in later backwards such a gradient is complete
when it has come as often.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from paceline.reducer.backward.state import RUNNING, BackwardState
from paceline.torch.model.torch_compile import untraced


class DeferredGradients:
    """The deferred gradients of one wrapped model."""

    def __init__(
        self,
        state: BackwardState,
        hand_over: Callable[[int], None],
        delayed: Collection[int],
        *,
        is_learning: bool,
        part: Callable[[list[int]], None],
    ) -> None:
        self.is_learning = is_learning
        # Copies gradients that share memory: autograd would add the next contribution to both of them.
        self._part = part
        self._state = state
        self._hand_over = hand_over
        self._delayed = frozenset(delayed)
        # How often each gradient has come in this backward, in the order in which they last came.
        self._came: dict[int, int] = {}
        self._learned: dict[int, int] | None = None
        self._expected: dict[int, int] = {}

    def is_late(self, index: int) -> bool:
        return self.is_learning or index in self._delayed or index in self._expected

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        state, came, expected = self._state, self._came, self._expected.get(index)

        @untraced
        def note(_: torch.Tensor) -> None:
            if not state.is_syncing:
                if index not in state.accumulated:
                    self._part([index])
                state.accumulated.add(index)
                return
            if state.phase < RUNNING:
                state.arm()
            if index in state.handed:
                state.status.twice = index
                return
            count = came.pop(index, 0) + 1
            if count == expected:
                self._hand_over(index)
            else:
                came[index] = count
                if count == 1:
                    self._part([index])

        return note

    def with_trigger(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """The hook of param_to_hook_all_reduce: hands its gradient over, and then the delayed ones."""

        @untraced
        def hand_over(parameter: torch.Tensor) -> None:
            hook(parameter)
            for index in [index for index in self._came if index in self._delayed]:
                del self._came[index]
                self._hand_over(index)

        return hand_over

    def end_backward(self) -> None:
        if not self._came:
            return
        came = dict(self._came)
        self.forget()
        if self.is_learning:
            self._learned = {index: count for index, count in came.items() if count > 1}
        for index in came:
            self._hand_over(index)

    def forget(self) -> None:
        self._came.clear()

    def learn(self) -> bool:
        """Adopt the counts of the first backward. Returns whether there are any, so that hooks must change.

        Returns True again until `end_learning()`, in case the change of hooks was interrupted.
        """
        if self._learned is None:
            return False
        self._expected, self.is_learning = self._learned, False
        return True

    def end_learning(self) -> None:
        self._learned = None
