"""The stand-in for a parameter's gradient of which each rank has its part of the mean.

Paddle has no tensors that refuse to be computed with. So the gradient is dropped, and the parameter itself
raises, on every rank, if `.grad` or another access reads its gradient.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import paddle

from paceline.sharding import scattered_gradients
from paceline.sharding.scattered_gradients import NO_BACKWARD


class ScatteredGradient:
    of: Scattered

    def __init__(self, name: str, number: int, parameter: paddle.Tensor) -> None:
        self._name = name
        self.number, self.of_backward = number, NO_BACKWARD

    def __repr__(self) -> str:
        return f"<the gradient of '{self._name}', of which this rank has its own part>"

    def refuse(self) -> NoReturn:
        raise self.of.cannot_use(
            self.number,
            "something that reads .grad",
            "paddle.nn.utils.clip_grad_norm_, an optimizer that is not sharded, or layer.to() before "
            "gradients were cleared",
        )


Scattered: TypeAlias = scattered_gradients.Scattered[paddle.Tensor]
