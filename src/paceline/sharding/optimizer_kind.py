"""Finds out whether an optimizer's parameters may be cut, by trial steps on small tensors.

Two optimizers, each on one part of a tensor, are compared bit for bit with one optimizer on all of it, over
several steps, including scalar state such as step counts. The same test on whole tensors detects optimizers
that cannot be divided at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

import numpy as np

from paceline.reducer.framework_ops import Tensor, numel
from paceline.sharding.optimizer_arguments import coupled, no_step
from paceline.sharding.partition import CUT_ELEMENTS

_STEPS = 6
_SIZES = (2 * CUT_ELEMENTS + 37, 3 * CUT_ELEMENTS + 5)
_MATRICES = ((8, 12), (16, 6))

Optimizer = TypeVar("Optimizer")


class Kind(Enum):
    ELEMENTS = "elements"
    """Every element is updated by itself: parameters may be cut."""
    PARAMETERS = "parameters"
    """Every parameter is updated by itself, or the test could not be made: parameters stay whole."""
    COUPLED = "coupled"
    """The update of a parameter depends on other parameters."""


class OptimizerTrials(ABC, Generic[Tensor, Optimizer]):
    """Makes small tensors of one framework, dtype and device, and optimizers of them with given options."""

    own_shape: tuple[int, ...]

    def tensors(self, shapes: Sequence[tuple[int, ...]], seed: int, scale: float = 1.0) -> list[Tensor]:
        """Normally distributed values, the same for the same seed. With a `seed` other than 0, about a tenth
        of them are 0.
        """
        drawn = np.random.default_rng(seed)
        made = []
        for shape in shapes:
            values = scale * drawn.standard_normal(shape)
            if seed:
                values *= drawn.random(shape) > 0.1
            made.append(self.tensor(values))
        return made

    @abstractmethod
    def tensor(self, values: np.ndarray[Any, Any]) -> Tensor: ...

    @abstractmethod
    def make(self, tensors: Sequence[Tensor]) -> Optimizer: ...

    @abstractmethod
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
        """Make a step with copies of these gradients, one for each tensor of the optimizer."""

    @abstractmethod
    def same(self, one: Tensor, other: Tensor) -> bool: ...

    @abstractmethod
    def remembered(self, optimizer: Optimizer) -> list[Mapping[Any, Any]]:
        """The optimizer's state for each tensor, by name: for example the step count, as a tensor or a
        number.
        """

    @abstractmethod
    def draw_from(self, seed: int) -> None: ...


def checked_kind(find: Callable[[], Kind], optimizer_class: type[Any], parameters: str) -> Kind:
    """Return the kind that `find` returns, or raise ConfigError if the optimizer cannot be sharded."""
    try:
        kind = find()
    except Exception as error:
        raise no_step(optimizer_class, parameters, error) from error
    if kind is Kind.COUPLED:
        raise coupled(optimizer_class)
    return kind


def kind_of(trials: OptimizerTrials[Tensor, Optimizer]) -> Kind:
    """How optimizers that this trials makes can be divided."""
    trial = _Trial(trials)
    flat = [(size,) for size in _SIZES]
    if trial.is_divisible(flat, trial.halves) is True and trial.has_plain_state():
        return Kind.ELEMENTS
    # Matrices, because some optimizers accept nothing else.
    is_divisible = trial.is_divisible(_MATRICES, trial.wholes)
    if is_divisible is None:
        trial.check_step()
    if is_divisible is not False:
        return Kind.PARAMETERS
    return Kind.PARAMETERS if trial.draws_numbers() else Kind.COUPLED


class _Trial(Generic[Tensor, Optimizer]):
    def __init__(self, trials: OptimizerTrials[Tensor, Optimizer]) -> None:
        self._trials = trials

    def halves(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        first, second = tensors
        return [[first, second[:CUT_ELEMENTS]], [second[CUT_ELEMENTS:]]]

    def wholes(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return [[tensor] for tensor in tensors]

    def is_divisible(
        self,
        shapes: Sequence[tuple[int, ...]],
        parts_of: Callable[[Sequence[Tensor]], list[list[Tensor]]],
    ) -> bool | None:
        """True if optimizers of the parts give the same result as one of all tensors. None: the optimizer
        raises on these tensors.
        """
        trials = self._trials
        together = trials.tensors(shapes, 0)
        divided = [tensor.clone() for tensor in together]
        try:
            one, several = trials.make(together), [trials.make(parts) for parts in parts_of(divided)]
            for number in range(1, _STEPS + 1):
                # Gradients of very different magnitudes, some of them zero.
                gradients = trials.tensors(shapes, number, 10.0 ** (number % 4 - 2))
                trials.step(one, gradients)
                for optimizer, own in zip(several, parts_of(gradients), strict=True):
                    trials.step(optimizer, own)
        except Exception:
            return None
        are_same = all(map(trials.same, together, divided))
        return (
            are_same and len({_numbers(trials.remembered(optimizer)) for optimizer in [one, *several]}) == 1
        )

    def check_step(self) -> None:
        trials, shapes = self._trials, [self._trials.own_shape]
        try:
            optimizer = trials.make(trials.tensors(shapes, 0))
        except Exception:
            return  # its constructor needs more than this test passes
        trials.step(optimizer, trials.tensors(shapes, 1))

    def has_plain_state(self) -> bool:
        """True if each state of a parameter has the parameter's shape or is a single value, so that it can be
        cut.
        """
        shapes = [(_SIZES[0],)]
        optimizer = self._trials.make(self._trials.tensors(shapes, 0))
        self._trials.step(optimizer, self._trials.tensors(shapes, 1))
        values = [value for held in self._trials.remembered(optimizer) for value in held.values()]
        return all(
            tuple(value.shape) == shapes[0] or numel(value) == 1
            if hasattr(value, "shape")
            else value is None or isinstance(value, (bool, int, float, complex, str))
            for value in values
        )

    def draws_numbers(self) -> bool:
        trials = self._trials
        results = []
        for seed in (1, 2):
            trials.draw_from(seed)
            tensors = trials.tensors(_MATRICES, 0)
            trials.step(trials.make(tensors), trials.tensors(_MATRICES, 1))
            results.append(tensors)
        return not all(map(trials.same, *results))


def _numbers(remembered: Sequence[Mapping[Any, Any]]) -> tuple[Any, ...]:
    numbers: list[tuple[Any, Any]] = []
    for key, value in remembered[0].items() if remembered else ():
        if isinstance(value, (int, float)):
            numbers.append((key, value))
        elif hasattr(value, "shape") and numel(value) == 1:
            numbers.append((key, value.item()))
    return tuple(numbers)
