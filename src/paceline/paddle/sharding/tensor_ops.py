"""Paddle's tensors, as `paceline.sharding` uses them.

A parameter's memory is exchanged beneath it, so it stays the object, and keeps the name, by which layers and
optimizers know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.sharding.gradient_stand_in import ScatteredGradient
from paceline.sharding import shards
from paceline.sharding.cuts import Piece
from paceline.sharding.framework_ops import Names, dtype_name, nbytes, numel
from paceline.sharding.optimizer_arguments import OWNER


class PaddleOps:
    """See `FrameworkOps`."""

    names = Names(
        wrapper="DataParallel",
        variable="model",
        loading="model.set_state_dict()",
        clearing="optimizer.clear_grad()",
        moving="layer.to(), or another conversion",
        converting="layer.to(dtype=...) or another conversion",
    )
    tensor = paddle.Tensor
    stand_in = ScatteredGradient

    def is_dense(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.is_contiguous())

    def extent(self, tensor: paddle.Tensor) -> int:
        return nbytes(tensor)

    def data(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach()

    def flat(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return paddle.view(tensor.detach(), [numel(tensor)])

    def split(self, flat: paddle.Tensor, sizes: Sequence[int]) -> Sequence[paddle.Tensor]:
        ends = np.cumsum(sizes).tolist()
        return [flat[end - size : end] for end, size in zip(ends, sizes)]

    def as_laid_out(self, tensor: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: Any,
        shape: Sequence[int],
        like: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        if not nbytes:
            return paddle.empty(list(shape), dtype)
        array = np.frombuffer(memory, np.uint8, nbytes, at)
        return internals.over(array, dtype).reshape(list(shape))

    def lay(self, tensor: paddle.Tensor, values: paddle.Tensor) -> None:
        internals.lay_into(tensor, values)

    def empty(self, shape: Sequence[int], dtype: Any, like: paddle.Tensor) -> paddle.Tensor:
        return internals.empty_on(like.place, shape, dtype)

    def from_bytes(self, data: bytes) -> paddle.Tensor:
        return paddle.to_tensor(list(data), "uint8", place=paddle.CPUPlace())

    def copy(self, source: paddle.Tensor, target: paddle.Tensor) -> None:
        with paddle.no_grad():
            paddle.assign(source, target)

    def scale(self, tensors: Sequence[paddle.Tensor], factor: float) -> None:
        with paddle.no_grad():
            for tensor in tensors:
                tensor.scale_(factor)

    def versions(self, tensors: Sequence[paddle.Tensor]) -> list[int]:
        return [int(tensor.inplace_version) for tensor in tensors]

    def count_writes(self, tensors: Sequence[paddle.Tensor]) -> None:
        internals.count_writes(tensors)

    def beside(self, tensor: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach().contiguous()

    def kept_copy(self, value: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        return value.detach().clone()

    def room_for_state(self, parameter: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        return internals.empty_on(parameter.place, parameter.shape, dtype)

    def watch_steps(self, check: Callable[[object, Iterable[paddle.Tensor]], None]) -> None:
        def look(optimizer: Any) -> None:
            check(optimizer, (each for group in internals.groups_of(optimizer) for each in group["params"]))

        internals.watch_steps(look)

    def is_trained(self, parameter: paddle.Tensor) -> bool:
        return not parameter.stop_gradient

    def form(self, parameter: paddle.Tensor) -> str:
        return f"shape {tuple(parameter.shape)}, {dtype_name(parameter)}"

    def gradient(self, parameter: paddle.Tensor) -> paddle.Tensor | ScatteredGradient | None:
        gradient = internals.gradient_of(parameter)
        if gradient is not None:
            return gradient
        stand_in: ScatteredGradient | None = internals.stand_in_of(parameter)
        return stand_in

    def put_stand_in(self, parameter: paddle.Tensor, stand_in: ScatteredGradient) -> None:
        internals.put_stand_in(parameter, stand_in)

    def lend_gradients(self, pieces: Sequence[paddle.Tensor], gradients: Sequence[paddle.Tensor]) -> None:
        for piece, gradient in zip(pieces, gradients):
            internals.lend_gradient(piece, gradient)

    def end_loans(self, pieces: Sequence[paddle.Tensor]) -> None:
        for piece in pieces:
            internals.end_loan(piece)


OPS = PaddleOps()


class Shards(shards.Shards[paddle.Tensor]):
    """All pieces of an optimizer's parameters, on one rank.

    Those of this rank are parameters of their own, with the names of the whole ones, by which Paddle's
    optimizers and users' functions know them.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(OPS, rank, world_size)
        self._updates = 0
        self._made: set[int] = set()

    def add(self, parameters: Sequence[paddle.Tensor], names: Sequence[str], pieces: Sequence[Piece]) -> None:
        super().add(parameters, names, pieces)
        self.make_parameters(self.own)

    def make_parameters(self, numbers: Sequence[int]) -> None:
        """Make parameters of their own of these pieces."""
        for number in numbers:
            name = self.parameters[self.pieces[number].parameter].name
            self.tensors[number] = internals.make_parameter(self.tensors[number], name)
            self._made.add(number)
            self._mark(number)

    def _mark(self, number: int) -> None:
        """Let a piece have the attributes by which optimizers decide about a parameter."""
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
        else:  # it may follow its parameter, as what detach() returns does
            self.tensors[number] = values

    def own_versions(self) -> list[int]:
        return [self._updates, *super().own_versions()]

    def count_updates_of(self, optimizer: Any) -> None:
        """Count what an optimizer of Paddle's updates as writes: its kernels count up no version."""

        def count() -> None:
            self._updates += 1

        internals.note_updates(optimizer, count)

    def _find_gradients(self) -> list[paddle.Tensor | ScatteredGradient | None]:
        found = []
        for name, parameter in zip(self.names, self.parameters):
            gradient = None if parameter.stop_gradient else OPS.gradient(parameter)
            if isinstance(gradient, paddle.Tensor) and internals.is_sparse(gradient):
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is sparse.",
                    expected="dense gradients",
                    hint="nn.Embedding(..., sparse=False); or an optimizer of its own for this parameter",
                )
            if internals.has_main_gradient(parameter):
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is kept as main_grad.",
                    likely="fleet.utils.mix_precision_utils",
                    hint="use the optimizer unsharded, or paddle.amp.decorate(..., master_grad=True)",
                )
            found.append(gradient)
        return found
