"""Whether parameters of an optimizer of Paddle's may be cut: what `sharding.kinds` asks of Paddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paceline.paddle import internals
from paceline.sharding import kinds
from paceline.sharding.kinds import Kind


def kind_of(make: Callable[[list[paddle.Tensor]], Any], model: paddle.Tensor) -> Kind:
    """How an optimizer can be divided. Leaves Paddle's random numbers and names as they are.

    Args:
        make: Makes one of a list of parameters, with the options of one group.
        model: A parameter of the group. Those of the test have its regularizer, dtype and place.

    Raises:
        Exception: What its step raises on such parameters, whatever their shape.
    """
    with undisturbed():
        return kinds.kind_of(PaddleWorkshop(make, model))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Within it optimizers are tried out: Paddle's random numbers and names stay as they are."""
    before = paddle.get_rng_state()
    try:
        with paddle.utils.unique_name.guard(), paddle.no_grad():
            yield
    finally:
        paddle.set_rng_state(before)


class PaddleWorkshop(kinds.Workshop[paddle.Tensor, Any]):
    """Makes small parameters and optimizers of them.

    Args:
        make: Makes an optimizer of a list of parameters.
        model: A parameter. The small ones have its regularizer, dtype and place.
    """

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
