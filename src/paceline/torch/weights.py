"""The weighted mean, over the micro-batches of one rank: `.grad` as their running mean.

The one idea: after micro-batches with weights w_1 ... w_n, .grad is sum(w_i * g_i) / W with W = sum(w_i). A
micro-batch of weight w keeps that true: .grad shrinks by W / (W + w) before autograd adds to it, and each
incoming gradient by w / (W + w). The reducer then weighs the ranks by their W, so the mean over ranks and
micro-batches is that of one process with the whole batch. A single micro-batch needs no scaling at all.

Models that were never given a weight pay nothing: the hooks come with the first weight.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.errors import ConfigError
from paceline.reducer.pass_state import PassState
from paceline.torch.running_call import RunningCall, running_call

Weight = float | int | torch.Tensor
"""A finite number that is not negative: of samples, of tokens."""


class MicroBatchWeights:
    """The weights of one rank's micro-batches, and what they do to its gradients.

    Args:
        parameters: The trainable ones.
        state: Of the model's passes.

    Attributes:
        is_used: Whether any weight was ever given.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], state: PassState) -> None:
        self.is_used = False
        self._parameters = parameters
        self._state = state
        self._handles: list[RemovableHandle] = []
        self._scopes: list[float] = []
        self._once: float | None = None
        self._of_forwards: float | None = None
        self._is_open = False  # a backward is under way that has begun to weigh
        self._weight = 0.0
        self._share = 1.0
        self._total = 0.0
        self._count = 0

    def use(self) -> None:
        """Have the hooks that weighing needs."""
        if self.is_used:
            return
        self.is_used = True
        self._handles = [
            parameter.register_hook(self._scale)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def give(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Weigh the next backward; or, if the result is entered, those within."""
        self.use()
        self._once = weight
        return self._scope(weight)

    def add_forward(self, weight: float) -> None:
        """Count a forward whose weight is known; those of several forwards before a backward add up."""
        self.use()
        self._of_forwards = weight + (self._of_forwards or 0.0)

    @contextlib.contextmanager
    def _scope(self, weight: float) -> Iterator[None]:
        self._once = None
        self._scopes.append(weight)
        try:
            yield
        finally:
            self._scopes.pop()

    def begin(self) -> float:
        """A backward begins (again to say so does nothing). Returns W of this rank, this backward counted.

        Raises:
            ConfigError: Some micro-batches since the last synchronised pass have a weight and others none.
        """
        if self._is_open:
            return self._total + self._weight
        given = self._given()
        if given is None and self._count == 0:
            return 1.0
        if given is None or (self._count == 0 and self._state.accumulated):
            raise ConfigError(
                "Some micro-batches of this step have a weight and others have none.",
                likely="weight() was called for some backwards between two steps only",
                hint="give every micro-batch its weight, those in no_sync() too",
            )
        self._is_open = True
        self._weight = given
        total = self._total + given
        self._share = 1.0 if self._count == 0 else (given / total if total else 0.0)
        if 0 < self._total < total:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            with torch.no_grad():
                torch._foreach_mul_(gradients, self._total / total)
        if not self._state.is_syncing:
            Variable._execution_engine.queue_callback(self._end_local)
        return total

    def end(self) -> None:
        """A synchronised pass is over, or given up."""
        self._close_backward()
        self._total, self._count = 0.0, 0

    def give_up_interrupted(self) -> None:
        """Forget a backward that ended in an exception, and with it what has accumulated."""
        if self._is_open:
            self.end()

    def watch_local(self) -> None:
        """An output of a forward in no_sync() has got its gradient: its backward begins."""
        if not self._is_open and running_call() is RunningCall.BACKWARD:
            self.begin()

    def _given(self) -> float | None:
        if self._once is not None:
            return self._once
        return self._scopes[-1] if self._scopes else self._of_forwards

    def _end_local(self) -> None:
        self._total += self._weight
        self._count += 1
        self._close_backward()

    def _close_backward(self) -> None:
        self._is_open = False
        self._once = self._of_forwards = None

    def _scale(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Runs before autograd adds a gradient to .grad."""
        if not self._is_open:
            return self._first(gradient)
        if self._share == 1.0:
            return None
        # A weight of 0 takes a gradient out, whatever it holds: 0 * NaN would be NaN.
        return gradient * self._share if self._share else torch.zeros_like(gradient)

    def _first(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if running_call() is RunningCall.GRAD:
            return None
        self.begin()
        return self._scale(gradient) if self._is_open else None


def as_weight(weight: object) -> float:
    """A weight as a float.

    Raises:
        ConfigError: It is not a finite number, or is negative.
    """
    try:
        value = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(
            "The weight of a rank's gradients makes no sense.",
            expected="a finite number, 0 or more: of samples, of tokens",
            got=f"weight={weight!r}",
        )
    return value
