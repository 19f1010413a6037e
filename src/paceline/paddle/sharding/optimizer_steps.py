"""Runs Paddle's optimizers: in trials on small tensors, to find out their kind, and for one block of a
journal.

Paddle identifies a piece by its parameter's name. There may be several pieces of one parameter, each in a
block of its own, so each block has its own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paceline.paddle import internals
from paceline.paddle.sharding.state_names import Key, make_state, remembered
from paceline.sharding import optimizer_kind
from paceline.sharding.journal import Part, slots_from
from paceline.sharding.journal_layout import Slot
from paceline.sharding.optimizer_arguments import no_journal
from paceline.sharding.optimizer_kind import Kind
from paceline.sharding.partition import CUT_ELEMENTS

_TRIAL_STEPS = 4


def kind_of(make: Callable[[list[paddle.Tensor]], Any], model: paddle.Tensor) -> Kind:
    """Find the kind of an optimizer, without changing Paddle's random numbers and name counters."""
    with undisturbed():
        return optimizer_kind.kind_of(PaddleTrials(make, model))


@contextmanager
def undisturbed() -> Iterator[None]:
    before = paddle.get_rng_state()
    try:
        with paddle.utils.unique_name.guard(), paddle.no_grad():
            yield
    finally:
        paddle.set_rng_state(before)


class PaddleTrials(optimizer_kind.OptimizerTrials[paddle.Tensor, Any]):
    def __init__(self, make: Callable[[list[paddle.Tensor]], Any], model: paddle.Tensor) -> None:
        self._make, self._model = make, model
        self.own_shape = tuple(model.shape)

    def tensor(self, values: np.ndarray[Any, Any]) -> paddle.Tensor:
        return paddle.to_tensor(values, place=self._model.place).astype(self._model.dtype)

    def make(self, tensors: Sequence[paddle.Tensor]) -> Any:
        parameters = []
        for number, tensor in enumerate(tensors):
            parameter = internals.make_parameter(tensor, f"trial_{number}")
            parameter.regularizer = getattr(self._model, "regularizer", None)
            parameters.append(parameter)
        return self._make(parameters)

    def step(self, optimizer: Any, gradients: Sequence[paddle.Tensor]) -> None:
        (group,) = internals.groups_of(optimizer)
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            internals.lend_gradient(parameter, gradient.clone())
        optimizer.step()

    def same(self, one: paddle.Tensor, other: paddle.Tensor) -> bool:
        if one.element_size() < 4:
            one, other = one.astype("float32"), other.astype("float32")
        return bool(np.array_equal(one.numpy(), other.numpy(), equal_nan=True))

    def remembered(self, optimizer: Any) -> list[Mapping[Any, Any]]:
        by_owner: dict[str, dict[str, Any]] = {}
        for owner, kind, value in internals.state_of(optimizer):
            by_owner.setdefault(owner, {})[kind] = value
        return list(by_owner.values())

    def draw_from(self, seed: int) -> None:
        paddle.seed(seed)


class PaddlePart(Part[paddle.Tensor]):
    def __init__(
        self,
        tensors: Sequence[paddle.Tensor],
        blocks: Sequence[Sequence[int]],
        optimizers: Sequence[Any],
    ) -> None:
        self._tensors, self.optimizers = tensors, optimizers
        self._block_of = {number: place for place, block in enumerate(blocks) for number in block}

    def optimizer_of(self, number: int) -> Any:
        return self.optimizers[self._block_of[number]]

    def has_gradient(self, number: int) -> bool:
        tensor = self._tensors[number]
        return not tensor.stop_gradient and internals.gradient_of(tensor) is not None

    def step(self, block: int, numbers: Sequence[int]) -> None:
        self.optimizers[block].step()

    def held(self, number: int) -> dict[Any, Any]:
        return remembered(self.optimizer_of(number), self._tensors[number].name)

    def lay(self, number: int, key: Any, view: paddle.Tensor) -> None:
        internals.lay_into(self.held(number)[key], view)

    def recall(self, number: int, views: Mapping[Any, paddle.Tensor]) -> None:
        make_state(self.optimizer_of(number), self._tensors[number])
        for key, value in self.held(number).items():
            if value.size:
                internals.lay_into(value, views[key])


def slots_of(make: Callable[[list[paddle.Tensor]], Any], model: paddle.Tensor) -> list[Slot]:
    """The state that an optimizer keeps for a parameter, found by trial steps on small tensors."""
    with undisturbed():
        trials = PaddleTrials(make, model)
        shapes = [(CUT_ELEMENTS + 3,)]
        tensors = trials.tensors(shapes, 0)
        one = trials.make(tensors)
        for number in range(1, _TRIAL_STEPS):
            trials.step(one, trials.tensors(shapes, number))
        others = [tensor.clone() for tensor in tensors]
        other = trials.make(others)
        held = _held_of(one)
        if held:
            make_state(other, _parameter_of(other))
        given = _held_of(other)
        goes_on = held.keys() == given.keys()
        if goes_on:
            for key, value in given.items():
                paddle.assign(held[key], value)
            for number in range(_TRIAL_STEPS, 2 * _TRIAL_STEPS):
                for optimizer in (one, other):
                    trials.step(optimizer, trials.tensors(shapes, number))
            goes_on = all(map(trials.same, tensors, others)) and held.keys() == _held_of(one).keys()
        if not goes_on:
            raise no_journal(f"{type(one).__name__}, which remembers more than its state")
    return slots_from(held, shapes[0])


def _held_of(optimizer: Any) -> dict[Key, paddle.Tensor]:
    return remembered(optimizer, _parameter_of(optimizer).name)


def _parameter_of(optimizer: Any) -> paddle.Tensor:
    (group,) = internals.groups_of(optimizer)
    (parameter,) = group["params"]
    return parameter
