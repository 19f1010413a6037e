"""Paceline: data-parallel training for PyTorch and PaddlePaddle, with gradients averaged in shared memory.

This package imports neither framework. `paceline.torch` wraps PyTorch models; `paceline.init` gives a Group
of processes with collectives on numpy arrays; `paceline.Checkpointer` saves the state of a training run;
`paceline.spawn` and `paceline run` start processes; `paceline.log` records a value to be shown while a job
runs.

The reference (docs/api) lists all public modules. Everything else is internal and may change in any release.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint.checkpointer import Checkpointer
    from paceline.collectives.group import Group
    from paceline.collectives.init import init
    from paceline.collectives.ops import ReduceOp
    from paceline.collectives.work import Work
    from paceline.launch.spawn import spawn
    from paceline.trace.logged import log

__version__ = "0.1.0"
__all__ = ["Checkpointer", "Group", "ReduceOp", "Work", "__version__", "init", "log", "spawn"]

# Imported at first use: the launcher's processes need neither numpy nor the core, and must start fast.
_MODULES = {
    "Checkpointer": "paceline.checkpoint.checkpointer",
    "Group": "paceline.collectives.group",
    "init": "paceline.collectives.init",
    "log": "paceline.trace.logged",
    "ReduceOp": "paceline.collectives.ops",
    "Work": "paceline.collectives.work",
    "spawn": "paceline.launch.spawn",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
