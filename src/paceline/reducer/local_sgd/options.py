"""The options and arithmetic of local SGD: replica groups train on their own and synchronise periodically.

The change that a replica group has made to its parameters since the last sync is treated as a gradient.
Averaged over the replica groups it is the *outer gradient*. An outer optimizer, SGD with momentum, makes a
step with it from the parameters of the last sync. With a learning rate of 1 and no momentum, the new
parameters are the mean of those of the replica groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.arguments import Arguments

MEMBERS = ("hosts", "ranks")

_Array = TypeVar("_Array", bound=Any)  # a tensor of any framework, or of numpy


@dataclass(frozen=True)
class LocalSGD:
    """How hosts train on their own, and how often they synchronise: the argument `local_sgd` of a wrapper.

    The ranks of a host average gradients in every step, as always, and stay equal. The hosts do not: each
    trains on its own for `every` synchronised backward passes. Then all hosts synchronise, and every rank
    continues with the same parameters: those of the last sync, from which an outer optimizer (SGD) has made
    one step with the mean change of the hosts. The defaults are those of DiLoCo; `outer_lr=1,
    outer_momentum=0` averages parameters, as post-local SGD and torch's PeriodicModelAverager do.

    Args:
        every: The number of synchronised backward passes between two syncs; those in no_sync() do not count.
        outer_lr: The learning rate of the outer optimizer; above 0.
        outer_momentum: Its momentum, from 0 to less than 1.
        nesterov: Whether the momentum is Nesterov's.
        warmup_steps: The number of synchronised backward passes at the beginning in which gradients are
            averaged over all ranks.
        between: "hosts" or "ranks". With "ranks" each rank trains on its own, so that one host can show what
            several will do.

    Raises:
        ConfigError: A value is invalid.

    Example:
        Two hosts; in the last 10 steps one has moved a weight from 1.0 to 0.8, the other to 0.6. With
        `LocalSGD(every=10, outer_lr=1, outer_momentum=0)` it is 0.7 on both after the sync.
    """

    every: int
    outer_lr: float = field(default=0.7, kw_only=True)
    outer_momentum: float = field(default=0.9, kw_only=True)
    nesterov: bool = field(default=True, kw_only=True)
    warmup_steps: int = field(default=0, kw_only=True)
    between: str = field(default="hosts", kw_only=True)

    def __post_init__(self) -> None:
        check = Arguments(type(self).__name__)
        hint = "every=16; fewer steps cost more bytes, more steps cost more quality"
        lr_hint = "outer_lr=0.7 with outer_momentum=0.9; outer_lr=1 with outer_momentum=0 averages"
        momentum = check.number("outer_momentum", self.outer_momentum, least=0, hint=lr_hint)
        check.require(momentum < 1, "outer_momentum", self.outer_momentum, "less than 1", lr_hint)
        checked = {
            "every": check.whole("every", self.every, least=1, hint=hint),
            "outer_lr": check.number("outer_lr", self.outer_lr, above=0, hint=lr_hint),
            "outer_momentum": momentum,
            "nesterov": check.flag("nesterov", self.nesterov),
            "warmup_steps": check.whole("warmup_steps", self.warmup_steps, least=0, hint="warmup_steps=500"),
            "between": check.choice("between", self.between, MEMBERS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # converted to plain Python numbers


def outer_step(
    parameter: _Array, momentum: _Array | None, gradient: _Array, options: LocalSGD
) -> tuple[_Array, _Array | None]:
    """One step of the outer optimizer, for one parameter.

    Products and sums are rounded one by one, so every processor and every framework computes the same bits.

    Returns:
        The new parameter, and the new momentum (None if the optimizer has none), as new arrays.
    """
    step = gradient
    if options.outer_momentum:
        momentum = gradient * 1.0 if momentum is None else momentum * options.outer_momentum + gradient
        step = gradient + momentum * options.outer_momentum if options.nesterov else momentum
    return parameter - step * options.outer_lr, momentum
