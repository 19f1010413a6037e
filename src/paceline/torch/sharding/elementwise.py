"""Whether parameters of an optimizer of torch may be cut: what `sharding.kinds` asks of torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from paceline.sharding import kinds
from paceline.sharding.kinds import Kind


def kind_of(optimizer_class: type[Optimizer], options: Mapping[str, Any], model: torch.Tensor) -> Kind:
    """How this optimizer, with these options, can be divided. Leaves torch's random numbers as they are.

    Args:
        optimizer_class: The optimizer.
        options: All options of one group of parameters.
        model: A parameter of the group. Those of the test have its dtype and device.

    Raises:
        Exception: What its step raises on such parameters, whatever their shape.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return kinds.kind_of(_TorchWorkshop(optimizer_class, options, model))


class _TorchWorkshop(kinds.Workshop[torch.Tensor, Optimizer]):
    def __init__(
        self, optimizer_class: type[Optimizer], options: Mapping[str, Any], model: torch.Tensor
    ) -> None:
        self._class, self._options = optimizer_class, dict(options)
        self._dtype, self._device, self.own_shape = model.dtype, model.device, tuple(model.shape)

    def tensor(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._dtype).to(self._device)

    def make(self, tensors: Sequence[torch.Tensor]) -> Optimizer:
        group = {**copy.deepcopy(self._options), "params": list(tensors)}
        return self._class([group])  # type: ignore[call-arg]

    def step(self, optimizer: Optimizer, gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())

    def remembered(self, optimizer: Optimizer) -> list[Mapping[Any, Any]]:
        return list(optimizer.state.values())

    def draw_from(self, seed: int) -> None:
        torch.manual_seed(seed)
