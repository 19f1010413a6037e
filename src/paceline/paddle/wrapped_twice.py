"""Paddle's DataParallel around ours, or ours around Paddle's: recognised, and refused with words."""

from __future__ import annotations

from paddle import nn
from paddle.distributed.parallel import DataParallel as _Theirs

from paceline.paddle import internals
from paceline.reducer.wrapped_model import WrappedModel
from paceline.reducer.wrapped_twice import callers, inner_error, outer_error

_OURS, _THEIRS = "paceline.paddle.DataParallel", "paddle.DataParallel"


def check_inner(layer: nn.Layer) -> None:
    """Refuse to wrap what Paddle has wrapped.

    Raises:
        ConfigError: A part of the model is a wrapper of Paddle's that averages.
    """
    for name, part in layer.named_sublayers(include_self=True):
        if _averages(part):
            raise inner_error(_OURS, _THEIRS, name)


def check_outer() -> None:
    """Refuse a forward that runs within a forward of a wrapper of Paddle's.

    Raises:
        ConfigError: There is one that averages.
    """
    if any(map(_averages, callers({_Theirs.forward.__code__}))):
        raise outer_error(_OURS, _THEIRS, f"a forward of ours within one of {_THEIRS}")


def _averages(layer: object) -> bool:
    """In a process that paddle.distributed does not know of others, Paddle's wrapper does nothing."""
    is_theirs = isinstance(layer, _Theirs) and not isinstance(layer, WrappedModel)
    return is_theirs and internals.ranks_of_wrapper(layer) > 1
