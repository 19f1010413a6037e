"""Arguments that torch's class has in the version that is installed, and that this one does not know.

The one idea: code that passes torch's defaults explicitly must run with any torch; another value must not be
ignored silently.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.arguments import show
from paceline.errors import ConfigError, ConfigTypeError

_OURS = (
    "buffers",
    "check_replicas_every",
    "init_sync_buffers",
    "nonfinite",
    "reduce_through",
    "timeout_s",
    "warn_after_s",
    "weight",
)


def check_later(arguments: Mapping[str, Any]) -> None:
    """Take arguments of the installed torch that have its default value.

    Raises:
        ConfigTypeError: torch has no such argument either.
        ConfigError: It has, but Paceline does not know what this value means.
    """
    known = inspect.signature(TorchDDP.__init__).parameters
    for name, value in arguments.items():
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *_OURS], n=1)
            raise ConfigTypeError(
                f"DistributedDataParallel() got an unexpected keyword argument '{name}'",
                expected="the arguments of torch's class, and Paceline's own",
                got=f"{name}={show(value)}",
                hint=f"did you mean {close[0]}?" if close else "help(DistributedDataParallel) lists them",
                argument=name,
            )
        default = known[name].default
        if value is not default and value != default:
            raise ConfigError(
                f"DistributedDataParallel: torch {torch.__version__} has an argument that Paceline does not "
                "know.",
                expected=f"{name}={default!r}, torch's default",
                got=f"{name}={show(value)}",
                hint="leave it out; or use a Paceline that is as new as this torch",
            )
