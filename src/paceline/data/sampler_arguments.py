"""Checks the arguments of the samplers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.arguments import Arguments
from paceline.errors import ConfigError

_SEED_HINT = "any whole number, the same on all ranks"


def seed_of(name: str, seed: int) -> int:
    """A seed as Python's own int, so that a state can be stored as JSON."""
    return Arguments(name).whole("seed", seed, hint=_SEED_HINT)


def length_of(name: str, dataset: object) -> int:
    """Number of samples."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise Arguments(name).refuse(
            "dataset",
            dataset,
            "something that has a length",
            "a class? Pass an instance"
            if isinstance(dataset, type)
            else "for iterable data without a length: paceline.data.DistributedStream",
            is_type=True,
            got=f"{type(dataset).__qualname__}, which has none",
        ) from None


def row_of(name: str, argument: str, values: object, expected: str) -> npt.NDArray[Any]:
    """An array of one dimension."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise _no_row(name, argument, values, expected, str(error)) from None
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        # An empty list has no type of its own.
        if array.ndim == 1 and array.size == 0:
            return array
        raise _no_row(name, argument, values, expected, f"{array.dtype}, shape {array.shape}")
    return array


def _no_row(name: str, argument: str, values: object, expected: str, seen: str) -> ConfigError:
    return Arguments(name).refuse(
        argument, values, expected, f"one list or array of numbers as {argument}", is_type=True, seen=seen
    )
