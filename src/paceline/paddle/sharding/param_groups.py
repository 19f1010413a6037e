"""Checks the arguments of `ShardedOptimizer`: parameters or groups of them, and the optimizer's own
arguments.

Paddle's optimizers only store their arguments before the first step. So one optimizer is made of all
parameters. It checks the arguments, fills in the options and marks the parameters like an unsharded one, and
it is the one that users read and change. Another optimizer, of this rank's pieces, makes the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import paddle

from paceline.arguments import Arguments
from paceline.paddle import internals
from paceline.sharding.optimizer_arguments import OWNER, wrong_arguments

_NO_OPTIONS = ("params", "grad_clip")
_FUNCTIONS = FunctionType, MethodType, functools.partial  # they take a parameter, or its name
_TRIAL_RATE = 0.01  # a schedule may begin at 0, with which no optimizer changes any element


def check_tensors(parameters: Sequence[paddle.Tensor]) -> None:
    check = Arguments(OWNER)
    if len({parameter.name for parameter in parameters}) < len(parameters):
        raise check.refuse(
            "parameters",
            f"{len(parameters)} parameters",
            "every parameter once, each with a name of its own: Paddle keeps an optimizer's state by names",
            "model.parameters() lists a tied parameter once; so must a list of your own",
            got="some name several times",
        )
    places = {str(parameter.place): parameter for parameter in parameters}
    if len(places) > 1:
        hint = "paddle.set_device() before the model is built"
        expected = "all of them on one device"
        got = f"parameters on {' and '.join(sorted(places))}"
        raise check.refuse("parameters", f"{len(parameters)} parameters", expected, hint, got=got)


def make_whole(optimizer_class: type[Any], entries: list[Any], defaults: Mapping[str, Any]) -> Any:
    """Make the optimizer of all parameters, whose step() is never called."""
    try:
        return optimizer_class(parameters=entries, **defaults)
    except (TypeError, ValueError, AssertionError, AttributeError, NotImplementedError) as error:
        raise wrong_arguments(optimizer_class, error, defaults) from error


def make_own(whole: Any, by_group: Sequence[list[paddle.Tensor]], defaults: Mapping[str, Any]) -> Any:
    """Make the optimizer of this rank's pieces. It does not clip, because clipping needs all gradients."""
    arguments = {**defaults, "grad_clip": None} if "grad_clip" in defaults else dict(defaults)
    groups = internals.groups_of(whole)
    filled = [own or [_nothing_of(group["params"][0])] for own, group in zip(by_group, groups, strict=True)]
    parameters: list[Any] = filled[0]
    if internals.has_groups(whole):
        parameters = [{**options_of(group), "params": own} for group, own in zip(groups, filled)]
    made = type(whole)(parameters=parameters, **arguments)
    internals.take_precision(made, whole)
    internals.share_notes(made, whole)
    return made


def _nothing_of(model: paddle.Tensor) -> paddle.Tensor:
    """A placeholder for a group without pieces on this rank, because Paddle reads the first parameter of a
    group.
    """
    made = internals.make_parameter(paddle.zeros([1], model.dtype), f"nothing_of_{model.name}")
    made.stop_gradient = True
    return made


def maker_of_trials(
    whole: Any, group: Mapping[str, Any], defaults: Mapping[str, Any], model: paddle.Tensor
) -> Callable[[list[paddle.Tensor]], Any]:
    def said_of_model(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda asked: function(model.name if isinstance(asked, str) else model)

    arguments = {
        name: said_of_model(value) if isinstance(value, _FUNCTIONS) else value
        for name, value in defaults.items()
        if name != "grad_clip"
    }
    if "learning_rate" in arguments:
        arguments["learning_rate"] = _TRIAL_RATE
    options = {name: value for name, value in options_of(group).items() if name != "learning_rate"}

    def make(parameters: list[paddle.Tensor]) -> Any:
        entries = [{**options, "params": parameters}] if internals.has_groups(whole) else parameters
        return type(whole)(parameters=entries, **arguments)

    return make


def copy_settings(whole: Any, made: Any) -> None:
    for name, value in vars(whole).items():
        if name != "_grad_clip" and (_is_plain(value) or _is_spelled(value)):
            setattr(made, name, value)
    if (scheduler := internals.scheduler_of(whole)) is not None:
        made.set_lr_scheduler(scheduler)


def copy_options(whole: Any, made: Any) -> None:
    if internals.has_groups(whole):
        pairs = zip(internals.groups_of(whole), internals.groups_of(made), strict=True)
        for theirs, own in pairs:
            own.update(options_of(theirs))


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NO_OPTIONS}


def spelled_options(whole: Any) -> dict[str, Any]:
    groups = internals.groups_of(whole) if internals.has_groups(whole) else []
    spelled = {"learning_rate": whole.get_lr()}
    spelled |= {name.strip("_"): value for name, value in vars(whole).items() if name != "_learning_rate"}
    for number, group in enumerate(groups):
        spelled |= {f"{name} of group {number}": value for name, value in group.items() if name != "params"}
    return {
        name: value if _is_plain(value) else str(value)
        for name, value in spelled.items()
        if _is_plain(value) or _is_spelled(value)
    }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_spelled(value: object) -> bool:
    kinds = paddle.regularizer.WeightDecayRegularizer, paddle.nn.ClipGradByNorm.__mro__[1]
    return isinstance(value, kinds) and type(value).__module__.startswith("paddle.")
