"""What is looked at before torch does it: steps of optimizers, and the state of a model that is half written.

N ranks that step one copy of the parameters would apply the update N times: an error at their step, before it
has begun.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.sharding.shared_parameters import check_whole, refuse_step

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
        refuse_step(optimizer, group["params"])


def check_before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """See `torch.nn.Module.register_state_dict_pre_hook`.

    Raises:
        TornStepError: The parameters hold half of an optimizer's step, in which a rank was lost.
    """
    check_whole(f"{type(module).__name__}.state_dict", module.parameters())
