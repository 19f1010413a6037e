"""What stands in the place of a parameter's gradient where each rank has its part of the mean.

The one idea: Paddle has no tensors that refuse to be computed with, so the gradient is dropped, and the
parameter answers for it: `.grad` and whatever else reads a gradient raises, on every rank. Why, and what it
stands for: `paceline.sharding.scattered_gradients`.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.sharding import scattered_gradients
from paceline.sharding.scattered_gradients import NO_BACKWARD


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


def held(parameter: paddle.Tensor) -> paddle.Tensor | ScatteredGradient | None:
    """The gradient of a parameter, or what stands for it."""
    gradient = internals.gradient_of(parameter)
    if gradient is not None:
        return gradient
    stand_in: ScatteredGradient | None = internals.stand_in_of(parameter)
    return stand_in
