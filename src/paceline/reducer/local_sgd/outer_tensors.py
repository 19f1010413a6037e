"""A model's parameters for an outer optimizer: 16-bit types as float32, complex numbers as pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic

from paceline.reducer.framework_ops import FrameworkOps, Tensor, dtype_name, numel
from paceline.reducer.plan import ParameterSpec
from paceline.reducer.replica_hashes import Entry


class OuterTensors(Generic[Tensor]):
    def __init__(self, ops: FrameworkOps[Tensor], names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        self.names = names
        self._ops, self._parameters = ops, parameters

    def specs(self) -> list[ParameterSpec]:
        return [
            ParameterSpec(
                name, numel(values), dtype_name(values), int(values.element_size()), self._ops.device(values)
            )
            for name, values in zip(self.names, map(self._ops.wide, self._parameters))
        ]

    def is_trained(self, index: int) -> bool:
        return self._ops.is_trained(self._parameters[index])

    def copy(self, index: int) -> Tensor:
        values = self._ops.wide(self._parameters[index])
        return self._ops.wide_copy(values, values)

    def has_changed(self, index: int, before: Tensor) -> bool:
        parameter = self._parameters[index]
        return not self._ops.is_equal(self._ops.rounded(before, parameter), self._ops.wide(parameter))

    def put_change(self, index: int, before: Tensor, place: Tensor) -> None:
        """Fill `place` with the parameter's value `before` minus its present value."""
        parameter = self._parameters[index]
        self._ops.subtract(self._ops.rounded(before, parameter), self._ops.wide(parameter), place)

    def write(self, index: int, values: Tensor) -> None:
        self._ops.write_wide(values, self._parameters[index])

    def like(self, index: int, values: Any) -> Tensor | None:
        if not isinstance(values, self._ops.tensor):
            return None
        return self._ops.wide_copy(values, self._ops.wide(self._parameters[index]))

    def hashes(self, values: Mapping[str, Tensor]) -> Sequence[Entry]:
        return self._ops.hash_model(values, {}, None)
