"""An optimizer's state, whole as an unsharded optimizer's, put together from pieces and cut into them.

The one idea: Paddle keeps what it remembers of a parameter under the name of the parameter, of the kind of
memory, and a number that counts up within a process. Here the number is always 0, as it is for the first
optimizer of a process; and any number is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import paddle

from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.paddle.communicator.communicators import Communicator
from paceline.paddle.model.parameters import dtype_name
from paceline.paddle.sharding.shards import Shards, part_of
from paceline.reducer.backward_errors import shorten
from paceline.sharding.cuts import Piece
from paceline.sharding.shared_step import OWNER

MASTERS = "master_weights"
"""The key of a state_dict under which Paddle keeps the weights in float32 of parameters of 16 bits."""
_OF_MASTER = "_fp32_master_0"
_NO_TENSORS = (MASTERS, "LR_Scheduler")


Key = tuple[bool, str]
"""What a tensor is that an optimizer remembers: whether Paddle keeps it under the name of the master weight,
and as Paddle calls it ("moment1"); "": it is the master weight."""


def remembered(optimizer: Any, name: str) -> dict[Key, paddle.Tensor]:
    """All that an optimizer remembers of the parameter, or of the piece, that it knows by this name."""
    found: dict[Key, paddle.Tensor] = {}
    master = internals.master_weights_of(optimizer).get(name)
    if master is not None:
        found[True, ""] = master
        found |= {(True, kind): each for kind, each in internals.state_of_one(optimizer, master.name).items()}
    return found | {(False, kind): each for kind, each in internals.state_of_one(optimizer, name).items()}


def make_state(optimizer: Any, tensor: paddle.Tensor) -> None:
    """Let an optimizer remember of one of its parameters what it would make at its first step."""
    for group in internals.groups_of(optimizer):
        if any(each is tensor for each in group["params"]):
            internals.make_state(optimizer, group, [tensor])


class _Memory(NamedTuple):
    """One tensor that an optimizer remembers of a piece."""

    piece: int
    """The index of the piece."""
    is_of_master: bool
    kind: str
    """See `Key`."""
    value: paddle.Tensor


def gather_state(
    shards: Shards, optimizer_of: Callable[[int], Any], communicator: Communicator | None, to: int
) -> dict[str, Any]:
    """Everybody's state, brought together on one rank. Collective.

    Args:
        shards: The pieces.
        optimizer_of: The optimizer of a piece of this rank, by its number.
        communicator: Between the ranks; None: there is one rank.
        to: The rank that gets it.

    Returns:
        What the unsharded optimizer's state_dict() would hold, without the scheduler, in memory of its own;
        empty on other ranks than `to`.
    """
    own = [
        _Memory(index, *key, value)
        for index in shards.own
        for key, value in remembered(optimizer_of(index), shards.tensors[index].name).items()
    ]
    forms = [[*memory[:3], list(memory.value.shape), dtype_name(memory.value.dtype)] for memory in own]
    payload = json.dumps(forms).encode()
    whole: dict[tuple[str, int, bool], paddle.Tensor] = {}
    for rank, each in enumerate([payload] if communicator is None else communicator.all_gather(payload)):
        told = json.loads(each)
        values = [memory.value for memory in own]
        if rank != shards.rank:
            place = shards.parameters[0].place
            values = [internals.empty_on(place, shape, dtype) for *_, shape, dtype in told]
        if communicator is not None and values:
            communicator.broadcast(values, root=rank)
        if to == shards.rank:
            for (index, is_of_master, kind, *_), value in zip(told, values):
                _add(whole, shards, _Memory(index, is_of_master, kind, value))
    return _named(whole, shards)


def put_together(shards: Shards, states: Sequence[Mapping[Key, paddle.Tensor]]) -> dict[str, Any]:
    """The same from what is remembered of each piece, of all ranks."""
    whole: dict[tuple[str, int, bool], paddle.Tensor] = {}
    for index, state in enumerate(states):
        for key, value in state.items():
            _add(whole, shards, _Memory(index, *key, value))
    return _named(whole, shards)


def _add(whole: dict[tuple[str, int, bool], paddle.Tensor], shards: Shards, memory: _Memory) -> None:
    piece = shards.pieces[memory.piece]
    parameter = shards.parameters[piece.parameter]
    key = memory.kind, piece.parameter, memory.is_of_master
    if not _is_cut(memory.value, piece):
        whole[key] = memory.value.clone()
        return
    if key not in whole:
        whole[key] = internals.empty_on(parameter.place, parameter.shape, memory.value.dtype)
    paddle.assign(memory.value, part_of(whole[key], piece))


def _is_cut(value: paddle.Tensor, piece: Piece) -> bool:
    """Whether a piece's optimizer remembers it of each element."""
    return not piece.is_whole and tuple(value.shape) == (piece.end - piece.begin,)


def _named(whole: Mapping[tuple[str, int, bool], paddle.Tensor], shards: Shards) -> dict[str, Any]:
    state: dict[str, Any] = {}
    masters: dict[str, paddle.Tensor] = {}
    for (kind, number, is_of_master), value in sorted(whole.items(), key=lambda each: each[0]):
        name = shards.parameters[number].name
        if not kind:
            value.name = name + _OF_MASTER
            masters[name] = value
            continue
        value.name = f"{name}{_OF_MASTER if is_of_master else ''}_{kind}_0"
        state[value.name] = value
    return {**state, MASTERS: masters} if masters else state


class LoadedState:
    """A state_dict of a sharded or an unsharded optimizer, by parameter.

    Args:
        state: The state_dict.
        parameters: All parameters of the optimizer.

    Raises:
        ConfigError: It holds tensors of no such parameter.
    """

    def __init__(self, state: Mapping[str, Any], parameters: Sequence[paddle.Tensor]) -> None:
        self._masters: Mapping[str, Any] = state.get(MASTERS, {})
        self._values = {name: value for name, value in state.items() if name not in _NO_TENSORS}
        names = [parameter.name for parameter in parameters]
        prefixes = tuple(f"{name}_" for name in names)
        strange = [key for key in self._values if not key.startswith(prefixes)]
        strange += [key for key in self._masters if key not in names]
        if strange:
            raise ConfigError(
                f"{OWNER}.set_state_dict: the state is of other parameters.",
                expected=f"names that begin with those of the parameters: {shorten(names)}",
                got=shorten(strange),
                likely="Paddle numbers layers as a process makes them, and this one has made others before",
                hint="make the model before anything else, as when the state was saved; or in `with "
                "paddle.utils.unique_name.guard():`",
            )

    def holds(self, parameter: paddle.Tensor) -> bool:
        """Whether there is anything of this parameter."""
        prefix = f"{parameter.name}_"
        return parameter.name in self._masters or any(key.startswith(prefix) for key in self._values)

    def give(self, optimizer: Any, piece: Piece, tensor: paddle.Tensor, parameter: paddle.Tensor) -> None:
        """Let an optimizer remember its part.

        Args:
            optimizer: The optimizer of the piece, which has made its state.
            piece: The piece.
            tensor: The piece as a parameter.
            parameter: The whole one.

        Raises:
            ConfigError: There is something of this parameter, but not this.
        """
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
    if _is_cut(target, piece) and tuple(value.shape) == tuple(parameter.shape):
        value = part_of(value if value.is_contiguous() else value.contiguous(), piece)
    if tuple(value.shape) != tuple(target.shape):
        raise ConfigError(
            f"{OWNER}.set_state_dict: '{target.name}' has another shape in the state.",
            expected=str(list(parameter.shape if _is_cut(target, piece) else target.shape)),
            got=str(list(value.shape)),
            hint="the state of a model of the same shapes",
        )
    target.set_value(value.astype(target.dtype))
