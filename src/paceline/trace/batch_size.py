"""Finds the batch size in the arguments of a model. Pure; uses only the `shape` of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DEPTH = 4  # levels of nested tuples, lists and dictionaries that are searched


def shape_of_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the first tensor among the arguments of a model; (1,) if there is none.

    Example:
        model(images, labels=classes) with 32 images of 3 x 8 x 8: (32, 3, 8, 8)
    """
    return _first_shape((*args, *kwargs.values()), _DEPTH) or (1,)


def samples_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of that tensor; 0 if there is none."""
    shape = _first_shape((*args, *kwargs.values()), _DEPTH)
    return shape[0] if shape else 0


def _first_shape(values: Iterable[Any], depth: int) -> tuple[int, ...] | None:
    for value in values:
        shape = getattr(value, "shape", None)
        if shape is not None:
            try:
                found = tuple(map(int, shape))
            except (TypeError, ValueError):  # an unrelated attribute of that name
                continue
            if found:  # a scalar is not a batch
                return found
        elif depth and isinstance(value, (tuple, list, Mapping)):
            inner = value.values() if isinstance(value, Mapping) else value
            if (below := _first_shape(inner, depth - 1)) is not None:
                return below
    return None
