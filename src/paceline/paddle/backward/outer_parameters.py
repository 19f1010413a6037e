"""What the syncs of local SGD ask of Paddle: reading and writing a model's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paceline.paddle.backward.replica_state import hash_model
from paceline.paddle.model.parameters import ITEMSIZES, ManagedTensors, dtype_name
from paceline.reducer.plan import ParameterSpec
from paceline.reducer.replica_check import Entry


class OuterParameters:
    """See `paceline.reducer.local_sgd.outer_sync.OuterTensors`.

    Args:
        tensors: The model's.
    """

    def __init__(self, tensors: ManagedTensors) -> None:
        self.names: Sequence[str] = tensors.all_names
        self._parameters = tensors.all_trainable

    def specs(self) -> list[ParameterSpec]:
        dtypes = [dtype_name(_wide(parameter).dtype) for parameter in self._parameters]
        return [
            ParameterSpec(name, int(parameter.size), dtype, ITEMSIZES[dtype], str(parameter.place))
            for name, parameter, dtype in zip(self.names, self._parameters, dtypes)
        ]

    def is_trained(self, index: int) -> bool:
        return not self._parameters[index].stop_gradient

    def copy(self, index: int) -> paddle.Tensor:
        return _wide(self._parameters[index]).clone()

    def has_changed(self, index: int, before: paddle.Tensor) -> bool:
        values = _wide(self._parameters[index])
        return not paddle.allclose(
            self._as_written(index, before), values, rtol=0.0, atol=0.0, equal_nan=True
        )

    def put_change(self, index: int, before: paddle.Tensor, place: paddle.Tensor) -> None:
        place.copy_(self._as_written(index, before) - _wide(self._parameters[index]), True)

    def write(self, index: int, values: paddle.Tensor) -> None:
        parameter = self._parameters[index]
        with paddle.no_grad():
            paddle.assign(values.astype(parameter.dtype), parameter)

    def like(self, index: int, values: Any) -> paddle.Tensor | None:
        is_tensor = isinstance(values, paddle.Tensor)
        dtype = _wide(self._parameters[index]).dtype
        return values.detach().astype(dtype).clone() if is_tensor else None

    def hashes(self, values: Mapping[str, paddle.Tensor]) -> Sequence[Entry]:
        return hash_model(values, {}, None)

    def _as_written(self, index: int, values: paddle.Tensor) -> paddle.Tensor:
        """What a parameter holds that these values were written to: rounded to 16 bits, if it has 16."""
        dtype = self._parameters[index].dtype
        return values if values.dtype == dtype else values.astype(dtype).astype(values.dtype)


def _wide(parameter: paddle.Tensor) -> paddle.Tensor:
    """Its values, of 16 bits as float32; one after the other in memory."""
    values = parameter.detach()
    values = values.astype("float32") if values.element_size() < 4 else values
    return values if values.is_contiguous() else values.contiguous()
