"""Paddle's tensors, as `paceline.sharding` uses them.

A parameter's memory is exchanged beneath it, so it stays the object, and keeps the name, by which layers and
optimizers know it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import paddle

from paceline.paddle import internals
from paceline.paddle.model.parameters import dtype_name
from paceline.paddle.sharding.scattered_gradients import ScatteredGradient, held
from paceline.sharding.framework_ops import Names, nbytes


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
    stand_in = ScatteredGradient

    def is_dense(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.is_contiguous())

    def extent(self, tensor: paddle.Tensor) -> int:
        return nbytes(tensor)

    def data(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach()

    def flat(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return paddle.view(tensor.detach(), [int(tensor.size)])

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

    def from_bytes(self, data: bytes) -> paddle.Tensor:
        return paddle.to_tensor(list(data), "uint8", place=paddle.CPUPlace())

    def room_for(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return paddle.empty(tensor.shape, tensor.dtype)

    def own_copy(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach().clone()

    def copy(self, source: paddle.Tensor, target: paddle.Tensor) -> None:
        with paddle.no_grad():
            paddle.assign(source, target)

    def scale(self, tensors: Sequence[paddle.Tensor], factor: float) -> None:
        with paddle.no_grad():
            for tensor in tensors:
                tensor.scale_(factor)

    def version(self, tensor: paddle.Tensor) -> int:
        return int(tensor.inplace_version)

    def count_writes(self, tensors: Sequence[paddle.Tensor]) -> None:
        internals.count_writes(tensors)

    def watch_steps(self, check: Callable[[object, Iterable[paddle.Tensor]], None]) -> None:
        def look(optimizer: Any) -> None:
            check(optimizer, (each for group in internals.groups_of(optimizer) for each in group["params"]))

        internals.watch_steps(look)

    def is_on_host(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.place.is_cpu_place())

    def is_trained(self, parameter: paddle.Tensor) -> bool:
        return not parameter.stop_gradient

    def form(self, parameter: paddle.Tensor) -> str:
        return f"shape {tuple(parameter.shape)}, {dtype_name(parameter.dtype)}"

    def gradient(self, parameter: paddle.Tensor) -> paddle.Tensor | ScatteredGradient | None:
        return held(parameter)

    def put_stand_in(self, parameter: paddle.Tensor, stand_in: ScatteredGradient) -> None:
        internals.put_stand_in(parameter, stand_in)

    def lend_gradient(self, piece: paddle.Tensor, gradient: paddle.Tensor) -> None:
        internals.lend_gradient(piece, gradient)

    def end_loan(self, piece: paddle.Tensor) -> None:
        internals.end_loan(piece)


OPS = PaddleOps()
