"""Optimizers that step within backward (torch's `_apply_optimizer_in_backward`), after the averaging.

torch calls them in a hook of each parameter, where they would step with this rank's own gradient. These hooks
are removed at the first forward, and the optimizers step when the means are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Steppers = list[tuple[torch.Tensor, list[torch.optim.Optimizer]]]
"""Parameters and the optimizers that step them."""


def take_over_optimizers(parameters: Sequence[torch.Tensor]) -> Steppers:
    found = [(p, p._in_backward_optimizers) for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if found:
        # Imported here because few programs use it, and it imports every optimizer.
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter, _ in found:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):  # type: ignore[no-untyped-call]
                handle.remove()
    return found


def step_in_backward(steppers: Steppers) -> None:
    """Step each parameter and drop its gradient, as torch's DDP does."""
    for parameter, optimizers in steppers:
        if parameter.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None
