"""What the syncs of local SGD ask of torch: reading and writing a model's parameters.

See `paceline.reducer.local_sgd.outer_sync`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.reducer.plan import ParameterSpec
from paceline.reducer.replica_check import Entry
from paceline.torch.backward.replica_state import hash_model
from paceline.torch.model.inner_tensors import as_plain, is_wrapper
from paceline.torch.model.parameters import ManagedTensors, dtype_name


class OuterParameters:
    """See `paceline.reducer.local_sgd.outer_sync.OuterTensors`.

    Args:
        tensors: The model's.
    """

    def __init__(self, tensors: ManagedTensors) -> None:
        self.names: Sequence[str] = tensors.names
        self._parameters = tensors.trainable

    def specs(self) -> list[ParameterSpec]:
        return [
            ParameterSpec(name, values.numel(), dtype_name(values.dtype), values.itemsize, str(values.device))
            for name, values in zip(self.names, map(_wide, self._parameters))
        ]

    def is_trained(self, index: int) -> bool:
        return self._parameters[index].requires_grad

    def copy(self, index: int) -> torch.Tensor:
        return _wide(self._parameters[index]).clone(memory_format=torch.contiguous_format)

    def has_changed(self, index: int, before: torch.Tensor) -> bool:
        before, values = self._as_written(index, before), _wide(self._parameters[index])
        return not torch.allclose(before, values, rtol=0.0, atol=0.0, equal_nan=True)

    def put_change(self, index: int, before: torch.Tensor, place: torch.Tensor) -> None:
        torch.sub(self._as_written(index, before), _wide(self._parameters[index]), out=place)

    def write(self, index: int, values: torch.Tensor) -> None:
        parameter = self._parameters[index].detach()
        parameter.copy_(torch.view_as_complex(values) if parameter.is_complex() else values)

    def like(self, index: int, values: Any) -> torch.Tensor | None:
        if not isinstance(values, torch.Tensor):
            return None
        wide = _wide(self._parameters[index])
        return values.detach().to(device=wide.device, dtype=wide.dtype, copy=True).contiguous()

    def hashes(self, values: Mapping[str, torch.Tensor]) -> Sequence[Entry]:
        return hash_model(values, {}, None)

    def _as_written(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """What a parameter holds that these values were written to: rounded to 16 bits, if it has 16."""
        parameter = self._parameters[index]
        if parameter.is_complex() or values.dtype is parameter.dtype:
            return values
        return values.to(parameter.dtype).to(values.dtype)


def _wide(parameter: torch.Tensor) -> torch.Tensor:
    """Its values: 16 bits as float32, complex numbers as pairs of real ones."""
    values = as_plain(parameter) if is_wrapper(parameter) else parameter.detach()
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    return values.float() if values.itemsize < 4 else values
