"""The arguments of `ShardedOptimizer`: groups of parameters and their hyperparameters, checked.

The optimizer's own class processes the arguments, with small stand-ins for the parameters. So each group gets
the options that it has in an unsharded optimizer, and a wrong argument raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.arguments import Arguments
from paceline.sharding import optimizer_arguments
from paceline.sharding.optimizer_arguments import OWNER, as_entries, wrong_arguments
from paceline.sharding.step_barriers import spell_options

NO_OPTIONS = ("params", "param_names")
"""Keys of a group that are no hyperparameters."""


def as_groups(params: Any) -> list[dict[str, Any]]:
    entries = as_entries("params", params, torch.Tensor, "parameters, (name, parameter) pairs")
    return entries if isinstance(entries[0], dict) else [{"params": entries}]


def _tensors_of(group: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each[1] if isinstance(each, tuple) else each for each in group["params"]]


def with_stand_ins(group: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor of one element stands for each parameter."""
    made = []
    for each in group["params"]:
        tensor = each[1] if isinstance(each, tuple) else each
        small = torch.empty([1] * tensor.dim(), dtype=tensor.dtype, device=tensor.device)
        made.append((each[0], small) if isinstance(each, tuple) else small)
    return {**group, "params": made}


def filled_as(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**own, "params": _tensors_of(group)}


def make_optimizer(
    optimizer_class: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any]
) -> Optimizer:
    try:
        return optimizer_class(groups, **defaults)
    except (TypeError, ValueError) as error:
        raise wrong_arguments(optimizer_class, error, defaults) from error


def check_class(optimizer_class: Any) -> None:
    """Refuse anything but an optimizer class, and a class whose methods show that it cannot be sharded."""
    optimizer_arguments.check_class(optimizer_class, Optimizer, "torch's", "torch.optim.AdamW")
    if optimizer_class is torch.optim.SparseAdam:
        raise Arguments(OWNER).refuse(
            "optimizer_class",
            optimizer_class.__name__,
            "an optimizer for dense gradients",
            "use it unsharded, for the parameters that have sparse gradients",
        )


def refuse_overlap(overlap_with_ddp: bool) -> None:
    if overlap_with_ddp:
        raise Arguments(OWNER).refuse(
            "overlap_with_ddp",
            True,
            "False: the step is made in step(), when backward() has returned on all ranks",
            "leave it out, remove the communication hook of hook_with_zero_step(), and call "
            "optimizer.step() after backward()",
            likely="written for ZeroRedundancyOptimizer on GPUs. Within the backward another rank may still "
            "read the old values, clipping and infinities need all gradients, and a CPU is busy anyway: "
            "nothing would be gained",
        )


def check_options(groups: Iterable[Mapping[str, Any]]) -> None:
    for group in groups:
        if group.get("differentiable"):
            raise Arguments(OWNER).refuse(
                "differentiable",
                True,
                "False: autograd does not see what other ranks have updated",
                "use the optimizer unsharded to differentiate through its steps",
            )


def check_tensors(parameters: Sequence[torch.Tensor]) -> None:
    check = Arguments(OWNER)
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise check.refuse(
            "params",
            f"{len(parameters)} parameters",
            "every parameter once",
            "model.parameters() lists a tied parameter once; so must a list of your own",
            got="some parameter several times",
        )
    kinds = sorted({parameter.device.type for parameter in parameters})
    if len(kinds) > 1:
        raise check.refuse(
            "params",
            f"{len(parameters)} parameters",
            "all of them on the CPU, or all on GPUs",
            "an optimizer for each kind of device",
            got=f"parameters on {' and '.join(kinds)}",
        )
    for parameter in parameters:
        if not (parameter.is_leaf or parameter.retains_grad):
            hint = "tensor.detach().requires_grad_(), or the parameters that it was computed from"
            raise check.refuse(
                "params", "a tensor that was computed", "parameters: leaves of the graph", hint
            )
        if parameter.layout is not torch.strided:
            raise check.refuse("params", parameter.layout, "dense parameters", "parameter.to_dense()")
        if parameter.is_meta:
            hint = 'module.to_empty(device="cpu"), and initialise it, before the optimizer is made'
            raise check.refuse(
                "params", "a parameter on the device meta", "parameters that have values", hint
            )


def plain_options(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hyperparameters, with tensors of one element as numbers."""
    return [
        {
            key: value.item()
            if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1
            else value
            for key, value in group.items()
            if key not in NO_OPTIONS
        }
        for group in groups
    ]


_UNCHANGING = frozenset({int, float, bool, complex, str, tuple, type(None)})


def looked_at(groups: Iterable[Mapping[str, Any]]) -> list[object]:
    """A snapshot of hyperparameters, to compare with later ones. Cheap if all values are immutable.

    A value that can be changed in place (a tensor, a list) is replaced by its contents.
    """
    seen: list[object] = []
    for group in groups:
        held = {**group}
        for key in NO_OPTIONS:
            held.pop(key, None)
        if _UNCHANGING.issuperset(map(type, held.values())):
            seen.append(held)
        else:
            seen.append(spell_options(plain_options([group])))
    return seen


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        for key, value in theirs.items():
            if key not in NO_OPTIONS:
                ours[key] = value


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The step without torch's wrapper, which calls global hooks: they are called once for the whole step."""
    step: Callable[..., Any] = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
