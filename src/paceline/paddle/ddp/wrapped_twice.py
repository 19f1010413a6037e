"""Detects Paddle's DataParallel around ours, or ours around Paddle's, and refuses both."""

from __future__ import annotations

from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.parallel import DataParallel as _Theirs
from paddle.hapi.model import DynamicGraphAdapter as _HapiModel

from paceline.ddp.wrapped_model import WrappedModel
from paceline.ddp.wrapped_twice import callers, inner_error, outer_error
from paceline.paddle import internals

_CURE = (
    "{} with the model itself makes our wrapper, if `paddle.DataParallel = paceline.paddle.DataParallel` "
    "stands before it"
)
_OURS, _THEIRS = "paceline.paddle.DataParallel", "paddle.DataParallel"


def check_inner(layer: nn.Layer) -> None:
    """Refuse to wrap a model that Paddle has wrapped."""
    for name, part in layer.named_sublayers(include_self=True):
        if _averages(part):
            raise inner_error(_OURS, _THEIRS, name, **_library(part))


def check_outer() -> None:
    """Refuse a forward that runs within a forward of Paddle's wrapper."""
    for outer in callers({_Theirs.forward.__code__}):
        if _averages(outer):
            raise outer_error(_OURS, _THEIRS, f"a forward of ours within one of {_THEIRS}", **_library(outer))


def _library(wrapper: object) -> dict[str, str]:
    adapters = callers({vars(_HapiModel)[name].__code__ for name in ("train_batch", "eval_batch")})
    if any(getattr(adapter, "ddp_model", None) is wrapper for adapter in adapters):
        return {"by": "paddle.Model (hapi)", "cure": _CURE.format("paddle.Model(model)")}
    groups = getattr(fleet.fleet, "_hcg", None)
    if groups is not None and getattr(wrapper, "group", None) is groups.get_data_parallel_group():
        return {
            "by": "fleet.distributed_model()",
            "cure": f"{_CURE} fleet.distributed_model(model) is called",
        }
    return {}


def _averages(layer: object) -> bool:
    """True if it is Paddle's wrapper and averages: with one rank in paddle.distributed it does nothing."""
    is_theirs = isinstance(layer, _Theirs) and not isinstance(layer, WrappedModel)
    return is_theirs and internals.ranks_of_wrapper(layer) > 1
