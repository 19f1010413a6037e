"""Splits inputs over devices and joins outputs, through any nesting of containers.

Tensors are split or joined along one dimension, containers are rebuilt around them, and any other object goes
to every device unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from paceline.arguments import show
from paceline.errors import ConfigError


def scatter(value: Any, devices: Sequence[torch.device], dim: int = 0) -> list[Any]:
    """Split every tensor in `value` along `dim`, one part for each device.

    Returns:
        At most as many values as there are devices; fewer where a tensor has fewer elements along `dim`.
    """
    if isinstance(value, torch.Tensor):
        if not -value.dim() <= dim < value.dim():
            raise ConfigError(
                f"DataParallel cannot cut inputs of shape {tuple(value.shape)} along dimension {dim}.",
                got=show(value),
                expected=f"tensors with a dimension {dim}, the batch",
                hint="pass numbers as Python numbers: those go to every device as they are",
            )
        parts = value.chunk(len(devices), dim)
        return [part.to(device, non_blocking=True) for part, device in zip(parts, devices)]
    children = _children(value)
    if not children:
        return [value for _ in devices]
    rows = zip(*(scatter(child, devices, dim) for child in children))
    return [_rebuild(value, list(row)) for row in rows]


def scatter_call(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int = 0
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    scattered = scatter(inputs, devices, dim) if inputs else []
    scattered_kwargs = scatter(kwargs, devices, dim) if kwargs else []
    count = max(len(scattered), len(scattered_kwargs), 1)
    scattered += [()] * (count - len(scattered))
    scattered_kwargs += [{}] * (count - len(scattered_kwargs))
    return scattered, scattered_kwargs


def gather(outputs: Sequence[Any], device: torch.device, dim: int = 0) -> Any:
    """Join the outputs of replicas: tensors along `dim`, on one device."""
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        raise _differ("types", [type(output).__name__ for output in outputs])
    if isinstance(first, torch.Tensor):
        return _join(outputs, device, dim)
    children = [_children(output) for output in outputs]
    if any(len(row) != len(children[0]) for row in children):
        raise _differ("lengths", [len(row) for row in children])
    if children[0]:
        _check_keys(outputs)
        return _rebuild(first, [gather(row, device, dim) for row in zip(*children)])
    if all(output is first or output == first for output in outputs):
        return first
    raise TypeError(
        f"DataParallel cannot gather objects of type {type(first).__name__} that differ between replicas: "
        "return tensors, or containers of tensors"
    )


def _join(outputs: Sequence[torch.Tensor], device: torch.device, dim: int) -> torch.Tensor:
    moved = [output.to(device, non_blocking=True) for output in outputs]
    if dim == 0 and all(output.dim() == 0 for output in moved):
        warnings.warn(
            "Was asked to gather along dimension 0, but all outputs are scalars: returning a vector of one "
            "for each replica",
            stacklevel=2,
        )
        return torch.stack(moved)
    return torch.cat(moved, dim)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _rebuild(like: Any, children: list[Any]) -> Any:
    kind: Callable[..., Any] = type(like)
    if isinstance(like, dict):
        return kind(dict(zip(like, children)))
    if isinstance(like, tuple) and hasattr(like, "_make"):
        return like._make(children)
    if isinstance(like, (tuple, list)):
        return kind(children)
    return kind(**{field.name: child for field, child in zip(fields(like), children)})


def _check_keys(outputs: Sequence[Any]) -> None:
    if isinstance(outputs[0], dict) and any(list(output) != list(outputs[0]) for output in outputs):
        raise _differ("keys", [list(output) for output in outputs])


def _differ(what: str, found: Sequence[object]) -> ConfigError:
    return ConfigError(
        f"The replicas of a DataParallel model returned different {what}.",
        expected="outputs that are built alike on every replica",
        got="\n".join(f"replica {number}: {one}" for number, one in enumerate(found)),
        likely="a forward whose outputs depend on the data",
    )
