"""Optimizers that would update shared parameters on each rank: an error at their step, before it has begun.

The one idea: N ranks that step one copy of the parameters would apply the update N times. Imports its
neighbours and `errors`.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import ConfigError
from paceline.torch.one_model.homes import Home, home_of

_is_watching = False


def watch_optimizers() -> None:
    """From now on, look at each optimizer of this process before its step. Once; there is no way back."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """See `torch.optim.optimizer.register_optimizer_step_pre_hook`.

    Optimizers whose class has a true `steps_shared_parameters` know what they do.

    Raises:
        ConfigError: It would change parameters that all ranks of the host share.
    """
    if getattr(optimizer, "steps_shared_parameters", False):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            home = home_of(parameter)
            if home is not None and not home.is_writing:
                raise _refused(optimizer, home)


def _refused(optimizer: Optimizer, home: Home) -> ConfigError:
    name = type(optimizer).__name__
    if not home.allows_writing:
        return ConfigError(
            f"{name}.step: its parameters are those of a model that several processes share to read.",
            seen=f"paceline.torch.share(), {home.world_size} processes",
            hint="copy.deepcopy(model) gives this process parameters of its own; or train with "
            "DistributedDataParallel(model, share_parameters=True)",
        )
    return ConfigError(
        f"{name}.step: its parameters are shared by {home.world_size} ranks, and each would apply "
        "the update to them.",
        seen="DistributedDataParallel(model, share_parameters=True); the optimizer may have been made before",
        expected="a step that all ranks make together",
        hint="`with ddp.writing(): optimizer.step()` on every rank; nothing has been changed yet",
    )
