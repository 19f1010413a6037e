"""May an optimizer's parameters be cut? Found out by steps on small tensors, not by the optimizer's name.

The one idea: an optimizer that is given half of a parameter and does to it what it would have done to this
half within the whole, bit for bit, treats every element by itself. Two optimizers on the two parts of a
tensor are compared with one on all of it, over several steps and with what they remember. The same test on
whole tensors finds optimizers that cannot be divided at all, because the update of one parameter depends on
others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.sharding.cuts import CUT_ELEMENTS

_STEPS = 6
_SIZES = (2 * CUT_ELEMENTS + 37, 3 * CUT_ELEMENTS + 5)
_MATRICES = ((8, 12), (16, 6))


class Kind(Enum):
    """How an optimizer can be divided among ranks."""

    ELEMENTS = "elements"
    """Every element is updated by itself: parameters may be cut."""
    PARAMETERS = "parameters"
    """Every parameter is updated by itself, or the test could not be made: parameters stay whole."""
    COUPLED = "coupled"
    """The update of a parameter depends on other parameters."""


def kind_of(
    optimizer_class: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Kind:
    """How this optimizer, with these options, can be divided. Leaves torch's random numbers as they are.

    Args:
        optimizer_class: The optimizer.
        options: All options of one group of parameters.
        dtype, device: Of the parameters.
    """

    def make(tensors: Sequence[torch.Tensor]) -> Optimizer:
        group = {**copy.deepcopy(dict(options)), "params": list(tensors)}
        return optimizer_class([group])  # type: ignore[call-arg]

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        flat = [(size,) for size in _SIZES]
        if _is_divisible(make, flat, dtype, device, _halves) is True and _has_plain_state(
            make, dtype, device
        ):
            return Kind.ELEMENTS
        # Matrices: there are optimizers that take nothing else.
        if _is_divisible(make, _MATRICES, dtype, device, _wholes) is not False:
            return Kind.PARAMETERS
        if _draws_numbers(make, dtype, device):
            return Kind.PARAMETERS
    return Kind.COUPLED


_Parts = Callable[[Sequence[torch.Tensor]], list[list[torch.Tensor]]]
"""Tensors, or views of parts of them, that each of two optimizers gets."""


def _halves(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    first, second = tensors
    return [[first, second[:CUT_ELEMENTS]], [second[CUT_ELEMENTS:]]]


def _wholes(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[tensor] for tensor in tensors]


def _is_divisible(
    make: Callable[[Sequence[torch.Tensor]], Optimizer],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    parts_of: _Parts,
) -> bool | None:
    """Whether optimizers of parts do what one of all tensors does; None: it makes no step on these."""
    together = _tensors(shapes, dtype, device, seed=0)
    divided = [tensor.clone() for tensor in together]
    try:
        one, several = make(together), [make(parts) for parts in parts_of(divided)]
        for number in range(1, _STEPS + 1):
            # Of very different sizes, and none at all in some places.
            gradients = _tensors(shapes, dtype, device, seed=number, scale=10.0 ** (number % 4 - 2))
            _step(one, together, gradients)
            for optimizer, own in zip(several, parts_of(gradients), strict=True):
                _step(optimizer, optimizer.param_groups[0]["params"], own)
    except Exception:
        return None
    return all(map(_same, together, divided)) and _same_scalars([one, *several])


def _has_plain_state(
    make: Callable[[Sequence[torch.Tensor]], Optimizer], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether all that it remembers of a parameter is shaped like it, or one value, so that it can be cut."""
    tensors = _tensors([(_SIZES[0],)], dtype, device, seed=0)
    optimizer = make(tensors)
    _step(optimizer, tensors, _tensors([(_SIZES[0],)], dtype, device, seed=1))
    values = [value for held in optimizer.state.values() for value in held.values()]
    return all(
        value.shape == tensors[0].shape or not value.dim()
        if isinstance(value, torch.Tensor)
        else value is None or isinstance(value, (bool, int, float, complex, str))
        for value in values
    )


def _draws_numbers(
    make: Callable[[Sequence[torch.Tensor]], Optimizer], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether two optimizers that do the same on the same tensors come to different results."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tensors = _tensors(_MATRICES, dtype, device, seed=0)
        _step(make(tensors), tensors, _tensors(_MATRICES, dtype, device, seed=1))
        results.append(tensors)
    return not all(map(_same, *results))


def _tensors(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        values = scale * torch.randn(shape, generator=generator)
        if seed:
            values *= torch.rand(shape, generator=generator) > 0.1
        made.append(values.to(dtype).to(device))
    return made


def _step(optimizer: Optimizer, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient.clone()
    optimizer.step()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _same_scalars(optimizers: Sequence[Optimizer]) -> bool:
    """Whether what they remember of each parameter as one number (the count of steps) is the same."""
    return len({tuple(_scalars(optimizer)) for optimizer in optimizers}) == 1


def _scalars(optimizer: Optimizer) -> Iterator[tuple[Any, Any]]:
    held: Mapping[Any, Any] = next(iter(optimizer.state.values()), {})
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            yield key, value.item()
        elif isinstance(value, (int, float)):
            yield key, value
