"""Whether parameters of an optimizer of torch may be cut: what `sharding.kinds` asks of torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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


class _TorchWorkshop:
    """See `Workshop`."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: Mapping[str, Any],
        model: torch.Tensor,
    ) -> None:
        self._class, self._options = optimizer_class, dict(options)
        self._dtype, self._device, self.own_shape = model.dtype, model.device, tuple(model.shape)

    def tensors(self, shapes: Sequence[tuple[int, ...]], seed: int, scale: float = 1.0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = []
        for shape in shapes:
            values = scale * torch.randn(shape, generator=generator)
            if seed:
                values *= torch.rand(shape, generator=generator) > 0.1
            made.append(values.to(self._dtype).to(self._device))
        return made

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def part(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return tensor[begin:end]

    def make(self, tensors: Sequence[torch.Tensor]) -> Optimizer:
        group = {**copy.deepcopy(self._options), "params": list(tensors)}
        return self._class([group])  # type: ignore[call-arg]

    def step(self, optimizer: Optimizer, gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())

    def scalars(self, optimizer: Optimizer) -> tuple[Any, ...]:
        return tuple(_scalars(next(iter(optimizer.state.values()), {})))

    def has_plain_state(self, optimizer: Optimizer, shape: tuple[int, ...]) -> bool:
        values = [value for held in optimizer.state.values() for value in held.values()]
        return all(
            value.shape == shape or not value.dim()
            if isinstance(value, torch.Tensor)
            else value is None or isinstance(value, (bool, int, float, complex, str))
            for value in values
        )

    def draw_from(self, seed: int) -> None:
        torch.manual_seed(seed)


def _scalars(held: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            yield key, value.item()
        elif isinstance(value, (int, float)):
            yield key, value
