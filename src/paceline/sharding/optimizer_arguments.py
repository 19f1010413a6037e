"""Checks the arguments of any framework's `ShardedOptimizer`, and refuses what cannot be sharded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from paceline.arguments import Arguments
from paceline.errors import ConfigError

OWNER = "ShardedOptimizer"


def as_entries(argument: str, parameters: Any, tensor: type[Any], kinds: str) -> list[Any]:
    """Return the parameters, or groups with lists of parameters, without changing the user's objects."""
    check, expected = Arguments(OWNER), f'{kinds}, or dicts with them under "params"'
    if isinstance(parameters, (tensor, Mapping)) or not isinstance(parameters, Iterable):
        raise check.refuse(argument, parameters, expected, "model.parameters()", is_type=True)
    entries = list(parameters)
    if not entries:
        hint = "model.parameters() of a model with any"
        raise check.refuse(argument, parameters, f"{expected}, at least one", hint)
    if not isinstance(entries[0], dict):
        return _checked_list(argument, entries, tensor, kinds, expected)
    groups = []
    for entry in entries:
        hint = '{"params": model.parameters()}'
        if not isinstance(entry, dict) or "params" not in entry:
            raise check.refuse(argument, entry, expected, hint, is_type=True)
        held = entry["params"]
        if isinstance(held, (set, frozenset)):
            expected = "a list: the order in a set differs between ranks"
            raise check.refuse("params", held, expected, "list(...)", is_type=True)
        if not isinstance(held, Iterable):
            raise check.refuse(argument, held, expected, hint, is_type=True)
        listed = [held] if isinstance(held, tensor) else list(held)
        groups.append({**entry, "params": _checked_list(argument, listed, tensor, kinds, expected)})
    return groups


def _checked_list(
    argument: str, listed: list[Any], tensor: type[Any], kinds: str, expected: str
) -> list[Any]:
    for each in listed:
        is_pair = "pairs" in kinds and isinstance(each, tuple) and len(each) == 2
        if not isinstance(each[1] if is_pair else each, tensor):
            raise Arguments(OWNER).refuse(argument, each, expected, "model.parameters()", is_type=True)
    return listed


def check_class(optimizer_class: Any, base: type[Any], whose: str, example: str) -> None:
    """Refuse anything but a class of optimizers, and classes whose step() needs a closure."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, base)):
        hint = f"optimizer_class={example}"
        if isinstance(optimizer_class, base):
            hint = f"optimizer_class={type(optimizer_class).__name__}, and its arguments by name after it"
        expected = f"a class of optimizers, derived from {whose}"
        raise Arguments(OWNER).refuse("optimizer_class", optimizer_class, expected, hint, is_type=True)
    refuse_closure(optimizer_class)


def no_journal(got: str) -> ConfigError:
    return Arguments(OWNER).refuse(
        "journal",
        True,
        "parameters that the ranks of one host share, and an optimizer that updates every element by itself",
        "leave journal out: when a rank is lost, an error says whether the step is whole",
        got=got,
    )


def refuse_closure(optimizer_class: type[Any]) -> None:
    """Refuse an optimizer that evaluates the loss within its step."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Arguments(OWNER).refuse(
            "optimizer_class",
            optimizer_class.__name__,
            "an optimizer whose step() needs no closure",
            "use it unsharded: it evaluates the loss several times in a step, and looks at all parameters",
        )


def coupled(optimizer_class: type[Any]) -> ConfigError:
    name = optimizer_class.__name__
    return Arguments(OWNER).refuse(
        "optimizer_class",
        name,
        "an optimizer that updates every parameter by itself",
        "use it unsharded: every rank makes the whole step",
        got=f"{name}, which updates two tensors otherwise together than each of them alone",
    )


def no_step(optimizer_class: type[Any], parameters: str, error: BaseException) -> ConfigError:
    """The error for an optimizer whose step raises on such parameters in a trial."""
    name = optimizer_class.__name__
    return ConfigError(
        f"{OWNER}: {name} makes no step on these parameters.",
        seen=f"{type(error).__name__}: {error}",
        got=f"parameters of {parameters}",
        likely=f"{name} does not support their dtype or device with these arguments, sharded or not",
        hint=f"other arguments of {name}, or parameters of another dtype",
    )


def wrong_arguments(
    optimizer_class: type[Any], error: BaseException, defaults: Mapping[str, Any]
) -> ConfigError:
    return ConfigError(
        f"{OWNER}: {optimizer_class.__name__} refuses its arguments.",
        seen=str(error),
        got=", ".join(f"{name}={value!r}" for name, value in defaults.items()) or "no arguments",
        hint=f"the arguments of {optimizer_class.__name__}, by name, after those of {OWNER}",
    )


def refuse_copies() -> NoReturn:
    raise ConfigError(
        f"{OWNER} cannot be pickled or copied.",
        likely="it shares its step with other processes",
        hint="consolidate_state_dict(), and save state_dict(); make another optimizer and load it there",
    )
