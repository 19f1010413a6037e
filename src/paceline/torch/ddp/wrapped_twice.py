"""Detects torch's DistributedDataParallel around Paceline's, or Paceline's around torch's, and raises.

Paceline's wrapper within another one is no error: they know of each other (see `models_sharing_parameters`).
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.ddp.wrapped_model import WrappedModel
from paceline.ddp.wrapped_twice import callers, inner_error, outer_error
from paceline.errors import ConfigError

_OURS = "paceline.torch.DistributedDataParallel"


class AskedWhenWrapped:
    """An attribute that raises when torch's constructor reads it, which must not wrap Paceline's wrapper.

    torch's constructor reads this attribute first, on every rank. For all other code, the attribute is
    missing unless it is set.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        if instance is not None and sys._getframe(1).f_code is TorchDDP.__init__.__code__:
            raise outer_error(_OURS, _name(TorchDDP), "the call of its constructor")
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")


def check_inner(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if (theirs := _wrapper_of_torch(part)) is not None:
            raise inner_error(_OURS, theirs, name)


def check_outer(model: nn.Module, active: nn.Module | None) -> None:
    """Refuse a forward that runs within a forward of one of torch's wrappers.

    Args:
        model: Paceline's wrapper.
        active: The DDP module whose forward runs, according to torch. Some kinds of wrappers do not set it;
            that of `replicate()`, around a list of parameters, leaves it set if its forward has raised.
    """
    if isinstance(getattr(active, "module", None), nn.ParameterList):
        active = None
    codes = {nn.Module._call_impl.__code__, TorchDDP.forward.__code__}
    for outer in (model, *callers(codes), active):
        if isinstance(outer, nn.Module) and (theirs := _wrapper_of_torch(outer)) is not None:
            raise outer_error(_OURS, theirs, f"a forward of ours within one of a {theirs}")


def refuse_replicas() -> ConfigError:
    return ConfigError(
        f"DataParallel cannot replicate a {_OURS}, which belongs to one device.",
        likely="both wrappers are used, one around the other",
        hint="remove DataParallel, and start one process for each device; or remove DistributedDataParallel",
    )


def _wrapper_of_torch(module: nn.Module) -> str | None:
    if isinstance(module, TorchDDP) and not isinstance(module, WrappedModel):
        return _name(TorchDDP)
    # replicate() changes the class of a module. If its file is not imported, it was never called.
    replicate = sys.modules.get("torch.distributed._composable.replicate")
    marker = getattr(replicate, "DDP", None)
    if isinstance(marker, type) and isinstance(module, marker):
        return "torch's replicate()"
    return None


def _name(cls: type) -> str:
    return f"torch.nn.parallel.{cls.__name__}"
