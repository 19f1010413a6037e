"""Arguments that torch's class has in the version that is installed, and that this one does not know.

The one idea: code that passes torch's defaults explicitly must run with any torch; another value must not be
ignored silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.errors import ConfigError


def check_later(arguments: Mapping[str, Any]) -> None:
    """Take arguments of the installed torch that have its default value.

    Raises:
        TypeError: torch has no such argument either.
        ConfigError: It has, but Paceline does not know what this value means.
    """
    known = inspect.signature(TorchDDP.__init__).parameters
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"DistributedDataParallel() got an unexpected keyword argument '{name}'")
        default = known[name].default
        if value is not default and value != default:
            raise ConfigError(
                f"DistributedDataParallel: torch {torch.__version__} has an argument that Paceline does not "
                "know.",
                expected=f"{name}={default!r}, torch's default",
                got=f"{name}={value!r}",
                hint="leave it out; or use a Paceline that is as new as this torch",
            )
