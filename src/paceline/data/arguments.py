"""What callers pass, checked where it comes in. Imports errors."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from paceline.errors import ConfigError


def whole_number(name: str, argument: str, value: SupportsIndex) -> int:
    """`value` as Python's own int, which JSON can hold; numpy's integers pass.

    Raises:
        ConfigError: It is no integer.
    """
    try:
        return index(value)
    except TypeError:
        raise ConfigError(
            f"{name}: {argument} must be a whole number.", got=f"{value!r}, of type {type(value).__name__}"
        ) from None


def length_of(name: str, dataset: object) -> int:
    """Number of samples.

    Raises:
        ConfigError: The data set does not know.
    """
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"{name}: the data set has no length.",
            got=type(dataset).__qualname__,
            hint="for iterable data: paceline.data.DistributedStream",
        ) from None
