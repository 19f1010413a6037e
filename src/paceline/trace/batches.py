"""How large a batch is, by what a model is called with. Pure; knows tensors by their `shape` alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DEPTH = 4  # a batch of a tuple of a dictionary; what is deeper is no batch


def shape_of_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the first tensor among the arguments of a model; (1,) if there is none.

    Example:
        model(images, labels=classes) with 32 images of 3 x 8 x 8: (32, 3, 8, 8)
    """
    return _first_shape((*args, *kwargs.values()), _DEPTH) or (1,)


def samples_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """0: there is no tensor."""
    shape = _first_shape((*args, *kwargs.values()), _DEPTH)
    return shape[0] if shape else 0


def _first_shape(values: Iterable[Any], depth: int) -> tuple[int, ...] | None:
    for value in values:
        shape = getattr(value, "shape", None)
        if shape is not None:
            try:
                found = tuple(map(int, shape))
            except (TypeError, ValueError):  # something else of that name
                continue
            if found:  # a single number is no batch
                return found
        elif depth and isinstance(value, (tuple, list, Mapping)):
            inner = value.values() if isinstance(value, Mapping) else value
            if (below := _first_shape(inner, depth - 1)) is not None:
                return below
    return None
