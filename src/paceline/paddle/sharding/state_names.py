"""The state of Paddle's optimizers by name: reads it, converts it to Paddle's names, and loads it.

Paddle's key of a state consists of the parameter's name, the kind of state, and a number that counts up
within a process. Here the number is always 0, as for the first optimizer of a process; any number is accepted
when a state is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.ops import OPS
from paceline.reducer.backward_errors import shorten
from paceline.sharding.optimizer_arguments import OWNER
from paceline.sharding.partition import Piece
from paceline.sharding.shards import part_of
from paceline.sharding.whole_state import Whole, is_cut

MASTERS = "master_weights"
"""The key of a state_dict under which Paddle keeps the float32 master weights of 16-bit parameters."""
_OF_MASTER = "_fp32_master_0"
_NO_TENSORS = (MASTERS, "LR_Scheduler")


Key = tuple[bool, str]
"""Identifies a state tensor: whether Paddle keeps it under the name of the master weight, and Paddle's name
of the kind of state ("moment1"); "": it is the master weight itself."""


def remembered(optimizer: Any, name: str) -> dict[Key, paddle.Tensor]:
    found: dict[Key, paddle.Tensor] = {}
    master = internals.master_weights_of(optimizer).get(name)
    if master is not None:
        found[True, ""] = master
        found |= {(True, kind): each for kind, each in internals.state_of_one(optimizer, master.name).items()}
    return found | {(False, kind): each for kind, each in internals.state_of_one(optimizer, name).items()}


def make_state(optimizer: Any, tensor: paddle.Tensor) -> None:
    for group in internals.groups_of(optimizer):
        if any(each is tensor for each in group["params"]):
            internals.make_state(optimizer, group, [tensor])


def named(whole: Whole, parameters: Sequence[paddle.Tensor]) -> dict[str, Any]:
    """The state_dict() of the unsharded optimizer, without the scheduler."""
    state: dict[str, Any] = {}
    masters: dict[str, paddle.Tensor] = {}
    found = [(kind, index, of_master) for index, held in whole.items() for of_master, kind in held]
    for kind, index, of_master in sorted(found):
        name, value = parameters[index].name, whole[index][of_master, kind]
        if not kind:
            value.name = name + _OF_MASTER
            masters[name] = value
            continue
        value.name = f"{name}{_OF_MASTER if of_master else ''}_{kind}_0"
        state[value.name] = value
    return {**state, MASTERS: masters} if masters else state


class LoadedState:
    def __init__(self, state: Mapping[str, Any], parameters: Sequence[paddle.Tensor]) -> None:
        self._masters: Mapping[str, Any] = state.get(MASTERS, {})
        self._values = {name: value for name, value in state.items() if name not in _NO_TENSORS}
        names = [parameter.name for parameter in parameters]
        prefixes = tuple(f"{name}_" for name in names)
        unknown = [key for key in self._values if not key.startswith(prefixes)]
        unknown += [key for key in self._masters if key not in names]
        if unknown:
            raise ConfigError(
                f"{OWNER}.set_state_dict: the state is of other parameters.",
                expected=f"names that begin with those of the parameters: {shorten(names)}",
                got=shorten(unknown),
                likely="Paddle numbers layers as a process makes them, and this one has made others before",
                hint="make the model before anything else, as when the state was saved; or in `with "
                "paddle.utils.unique_name.guard():`",
            )

    def holds(self, parameter: paddle.Tensor) -> bool:
        prefix = f"{parameter.name}_"
        return parameter.name in self._masters or any(key.startswith(prefix) for key in self._values)

    def give(self, optimizer: Any, piece: Piece, tensor: paddle.Tensor, parameter: paddle.Tensor) -> None:
        """Load this piece's part of the state into an optimizer."""
        master = internals.master_weights_of(optimizer).get(tensor.name)
        if master is not None:
            _set(master, self._find(self._masters, re.escape(tensor.name)), piece, parameter)
        owners = {tensor.name: re.escape(tensor.name)}
        if master is not None:
            owners[master.name] = re.escape(tensor.name) + r"_fp32_master_\d+"
        for owner, kind, value in internals.state_of(optimizer):
            if owner in owners:
                found = self._find(self._values, rf"{owners[owner]}_{re.escape(kind)}_\d+")
                _set(value, found, piece, parameter)

    def _find(self, values: Mapping[str, Any], pattern: str) -> paddle.Tensor:
        key = next((name for name in values if re.fullmatch(pattern, name)), None)
        if key is None:
            raise ConfigError(
                f"{OWNER}.set_state_dict: the state lacks what this optimizer remembers.",
                expected=f"a name of the form {pattern}",
                got=shorten(list(values)) or "no names",
                likely="it was saved by another optimizer, or with other options",
                hint="the optimizer and the options with which the state was saved",
            )
        value = values[key]
        return value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)


def _set(target: paddle.Tensor, value: paddle.Tensor, piece: Piece, parameter: paddle.Tensor) -> None:
    if is_cut(OPS, target, piece) and tuple(value.shape) == tuple(parameter.shape):
        value = part_of(OPS, OPS.as_laid_out(value, parameter), piece)
    if tuple(value.shape) != tuple(target.shape):
        raise ConfigError(
            f"{OWNER}.set_state_dict: '{target.name}' has another shape in the state.",
            expected=str(list(parameter.shape if is_cut(OPS, target, piece) else target.shape)),
            got=str(list(value.shape)),
            hint="the state of a model of the same shapes",
        )
    target.set_value(value.astype(target.dtype))
