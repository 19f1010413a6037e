"""What stands in the place of a parameter's gradient where each rank has its part of the mean.

The one idea: Paddle has no tensors that refuse to be computed with, so the gradient is dropped, and the
parameter answers for it: `.grad` and whatever else reads a gradient raises, on every rank. Why, and what it
stands for: `paceline.sharding.scattered_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.sharding import scattered_gradients
from paceline.sharding.scattered_gradients import NO_BACKWARD, Words


class ScatteredGradient:
    """Stands in the place of a parameter's gradient.

    Args:
        name: The parameter's name.
        number: Which parameter's it is.

    Attributes:
        of: The gradients that it is one of.
        number: As it was given.
        of_backward: The backward that has put it there.
    """

    of: Scattered

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self.number, self.of_backward = number, NO_BACKWARD

    def __repr__(self) -> str:
        return f"<the gradient of '{self._name}', of which this rank has its own part>"

    def refuse(self) -> NoReturn:
        raise ConfigError(
            f"The gradient of '{self._name}' cannot be used: this rank has a part of it.",
            seen='reduce="scatter", and something that reads .grad',
            expected="ShardedOptimizer.step(), which uses each rank's part; optimizer.clear_grad() before "
            "the next backward; model.clip_grad_norm_(), model.grad_norm() and model.nonfinite(), which know "
            "all parts",
            likely="paddle.nn.utils.clip_grad_norm_, an optimizer that is not sharded, or layer.to() before "
            "gradients were cleared",
            hint='wrap with reduce="mean" where a script needs whole gradients',
            parameter=self._name,
        )


Scattered: TypeAlias = scattered_gradients.Scattered[paddle.Tensor, ScatteredGradient]


class PaddleHands:
    """See `paceline.sharding.scattered_gradients.Hands`.

    Args:
        parameters: Those that the plan lists.
        places: Where the mean of each lies, where this rank owns it.
    """

    words = Words("DataParallel", "model", "optimizer.clear_grad()")

    def __init__(self, parameters: Sequence[paddle.Tensor], places: Sequence[paddle.Tensor]) -> None:
        self._parameters, self._places = parameters, places

    def put(self, index: int, stand_in: ScatteredGradient) -> None:
        internals.put_stand_in(self._parameters[index], stand_in)

    def found(self, index: int) -> object | None:
        return held(self._parameters[index])

    def cut(self, index: int, begin: int, end: int) -> paddle.Tensor:
        place = self._places[index]
        if end - begin == int(place.size):
            return place
        return paddle.view(place, [int(place.size)])[begin:end]

    def copy(self, source: paddle.Tensor, to: paddle.Tensor) -> None:
        to.copy_(source, True)

    def multiply(self, parts: Sequence[paddle.Tensor], factor: float) -> None:
        with paddle.no_grad():
            for part in parts:
                part.scale_(factor)


def held(parameter: paddle.Tensor) -> paddle.Tensor | ScatteredGradient | None:
    """The gradient of a parameter, or what stands for it."""
    gradient = internals.gradient_of(parameter)
    if gradient is not None:
        return gradient
    stand_in: ScatteredGradient | None = internals.stand_in_of(parameter)
    return stand_in
