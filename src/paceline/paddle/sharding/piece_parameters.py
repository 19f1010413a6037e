"""The pieces of an optimizer's parameters, as parameters for Paddle's optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.ops import OPS
from paceline.sharding import shards
from paceline.sharding.optimizer_arguments import OWNER
from paceline.sharding.partition import Piece


class PaddleShards(shards.Shards[paddle.Tensor]):
    """See `Shards`. The pieces of this rank are parameters with the names of the whole parameters.

    Paddle's optimizers and users' functions identify parameters by these names.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(OPS, rank, world_size)
        self._updates = 0
        self._made: set[int] = set()

    def add(self, parameters: Sequence[paddle.Tensor], names: Sequence[str], pieces: Sequence[Piece]) -> None:
        super().add(parameters, names, pieces)
        self.make_parameters(self.own)

    def make_parameters(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            name = self.parameters[self.pieces[number].parameter].name
            self.tensors[number] = internals.make_parameter(self.tensors[number], name)
            self._made.add(number)
            self._mark(number)

    def _mark(self, number: int) -> None:
        tensor, parameter = self.tensors[number], self.parameters[self.pieces[number].parameter]
        tensor.stop_gradient = parameter.stop_gradient
        tensor.optimize_attr = getattr(parameter, "optimize_attr", {"learning_rate": 1.0})
        tensor.regularizer = getattr(parameter, "regularizer", None)

    def follow(self) -> None:
        super().follow()
        for number in self.own:  # a parameter may have been frozen or marked since the last step
            self._mark(number)

    def _move(self, number: int, values: paddle.Tensor) -> None:
        if number in self._made:
            super()._move(number, values)
        else:  # a detached tensor always has its parameter's memory, which `lay_into` would exchange too
            self.tensors[number] = values

    def own_versions(self) -> list[int]:
        return [self._updates, *super().own_versions()]

    def count_updates_of(self, optimizer: Any) -> None:
        """Count this optimizer's updates, because Paddle's kernels do not count up versions."""

        def count() -> None:
            self._updates += 1

        internals.note_updates(optimizer, count)

    def _find_gradients(self) -> list[Any]:
        found = super()._find_gradients()
        for name, parameter in zip(self.names, self.parameters):
            if internals.has_main_gradient(parameter):
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is kept as main_grad.",
                    likely="fleet.utils.mix_precision_utils",
                    hint="use the optimizer unsharded, or paddle.amp.decorate(..., master_grad=True)",
                )
        return found
