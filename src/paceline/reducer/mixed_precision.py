"""The argument mixed_precision of both wrappers: three dtypes, as in torch's `_MixedPrecision`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.arguments import show
from paceline.errors import ConfigTypeError

Dtype = TypeVar("Dtype")
_NAMES = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class Precision(Generic[Dtype]):
    """The dtypes of mixed precision; None: those of the model.

    Attributes:
        param_dtype: The dtype of floating-point parameters and inputs within forward.
        reduce_dtype: The dtype in which gradients are averaged.
        buffer_dtype: The dtype of floating-point buffers.
    """

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


def as_precision(
    owner: str, given: Any, as_dtype: Callable[[object], Dtype | None], *, expected: str, hint: str
) -> Precision[Dtype]:
    """Convert the argument mixed_precision; None: the model's own dtypes.

    Gradients are averaged in param_dtype if reduce_dtype is None, as in torch.
    """
    if given is None:
        return Precision()
    dtypes: list[Dtype | None] = []
    for name in _NAMES:
        attribute = getattr(given, name, "missing")
        dtype = None if attribute is None else as_dtype(attribute)
        if attribute is not None and dtype is None:
            raise ConfigTypeError(
                f"{owner}: mixed_precision describes no precision.",
                expected=expected,
                got=f"mixed_precision={show(given)}, {name} is {attribute}",
                hint=hint,
                argument="mixed_precision",
            )
        dtypes.append(dtype)
    param_dtype, reduce_dtype, buffer_dtype = dtypes
    return Precision(param_dtype, param_dtype if reduce_dtype is None else reduce_dtype, buffer_dtype)
