"""An optimizer's state, whole as an unsharded optimizer's, put together from pieces and cut into them.

The one idea: of a cut parameter, what has the shape of the piece is cut like it; all else (the count of
steps) is the same for every piece. What an optimizer remembers may be nested, so it travels as a description
in JSON, in which tensors have numbers, and as these tensors. Nothing is pickled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.reducer.communicator import Communicator
from paceline.sharding.cuts import Piece
from paceline.torch.sharding.shards import Shards, like, part_of

State = dict[torch.Tensor, dict[Any, Any]]


def cut(state: Mapping[Any, Any], piece: Piece, parameter: torch.Tensor) -> dict[Any, Any]:
    """What a rank must remember of a piece, from what an unsharded optimizer remembers of its parameter.

    Args:
        state: The parameter's, as in `state_dict()["state"][index]`.
        piece: The piece.
        parameter: The parameter.

    Example:
        With {"step": 3, "exp_avg": [1.0, 2.0, 3.0, 4.0]}, the piece of the last two elements has
        {"step": 3, "exp_avg": [3.0, 4.0]}.
    """
    is_part = {
        key: not piece.is_whole and isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for key, value in state.items()
    }
    return {
        key: part_of(like(value, parameter), piece).clone() if is_part[key] else copy.deepcopy(value)
        for key, value in state.items()
    }


class WholeState:
    """Everybody's state, brought together on one rank. Collective to make.

    Args:
        shards: The pieces.
        state: What this rank's optimizer remembers, by piece.
        communicator: Between the ranks; None: there is one rank.
        to: The rank that gets it.

    Attributes:
        by_parameter: What an unsharded optimizer would remember, on the CPU; empty on other ranks than `to`.

    Raises:
        ConfigError: An optimizer remembers things that cannot travel: neither tensors nor plain values.
    """

    def __init__(
        self,
        shards: Shards,
        state: Mapping[torch.Tensor, Any],
        communicator: Communicator[torch.Tensor] | None,
        to: int,
    ) -> None:
        self.by_parameter: State = {}
        self._shards = shards
        self._is_target = to == shards.rank
        own = _describe(shards, state)
        payload = json.dumps([own.tree, [[list(t.shape), str(t.dtype)] for t in own.tensors], own.failure])
        payloads = [payload.encode()] if communicator is None else communicator.all_gather(payload.encode())
        told = [json.loads(each) for each in payloads]
        _raise_failures([failure for _, _, failure in told])
        for rank, (tree, forms, _) in enumerate(told):
            tensors = own.tensors if rank == shards.rank else _rooms(forms, shards)
            if communicator is not None and tensors:
                communicator.broadcast(tensors, root=rank)
            if self._is_target:
                states = [(shards.pieces[index], _built(described, tensors)) for index, described in tree]
                self.by_parameter = put_together(shards, states, self.by_parameter)


def put_together(
    shards: Shards, states: Iterable[tuple[Piece, Mapping[Any, Any]]], before: State | None = None
) -> State:
    """What an unsharded optimizer would remember.

    Args:
        shards: The pieces.
        states: What is remembered of each.
        before: What has been put together already.
    """
    by_parameter: State = {} if before is None else before
    for piece, state in states:
        if not state:
            continue
        parameter = shards.parameters[piece.parameter]
        whole = by_parameter.setdefault(parameter, {})
        for key, value in state.items():
            is_part = not piece.is_whole and isinstance(value, torch.Tensor)
            if not is_part or value.shape != (piece.end - piece.begin,):
                whole[key] = _laid_out(value, parameter)
                continue
            if key not in whole:
                whole[key] = torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False)
            part_of(whole[key], piece).copy_(value)
    return by_parameter


class _Described:
    """A rank's state as JSON and tensors."""

    def __init__(self) -> None:
        self.tree: list[tuple[int, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.failure = ""


def _describe(shards: Shards, state: Mapping[torch.Tensor, Any]) -> _Described:
    described = _Described()
    for index in shards.own:
        piece = shards.pieces[index]
        held = state.get(shards.tensors[index])
        if not held:
            continue
        device = shards.parameters[piece.parameter].device
        try:
            described.tree.append((index, _spelled(held, described.tensors, device)))
        except TypeError as error:
            name = shards.names[piece.parameter]
            described.failure = f"of parameter '{name}', the optimizer remembers {error}"
            described.tree, described.tensors = [], []
            break
    return described


def _spelled(value: Any, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """A value as JSON: a list of its kind and what it holds."""
    if isinstance(value, torch.Tensor):
        # To the parameter's device, whose group moves it: counts of steps of GPU optimizers lie on the CPU.
        tensors.append(value.detach().to(device).contiguous())
        return ["tensor", len(tensors) - 1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, Mapping):
        entries = [
            [_spelled(key, [], device), _spelled(each, tensors, device)] for key, each in value.items()
        ]
        return ["dict", entries]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_spelled(each, tensors, device) for each in value]]
    raise TypeError(f"an object of the class {type(value).__name__}")


def _built(described: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind, held = described
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {_built(key, tensors): _built(each, tensors) for key, each in held}
    if kind in ("list", "tuple"):
        built = [_built(each, tensors) for each in held]
        return built if kind == "list" else tuple(built)
    return held


def _laid_out(value: Any, parameter: torch.Tensor) -> Any:
    """A copy on the CPU; what has the parameter's shape is laid out as zeros_like() would."""
    if isinstance(value, torch.Tensor):
        if value.shape != parameter.shape:
            return value.cpu().clone()
        return torch.empty_like(parameter, dtype=value.dtype, device="cpu", requires_grad=False).copy_(value)
    if isinstance(value, dict):
        return {key: _laid_out(each, parameter) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_laid_out(each, parameter) for each in value)
    return value


def _rooms(forms: Sequence[Any], shards: Shards) -> list[torch.Tensor]:
    device = shards.parameters[0].device
    return [
        torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        for shape, dtype in forms
    ]


def _raise_failures(failures: Sequence[str]) -> None:
    failed = {rank: failure for rank, failure in enumerate(failures) if failure}
    if failed:
        raise ConfigError(
            "ShardedOptimizer.consolidate_state_dict: the state cannot be brought together.",
            seen="\n".join(f"rank {rank}: {failure}" for rank, failure in failed.items()),
            expected="tensors, numbers, texts, and lists, tuples and dicts of these",
            hint="save each rank's own part: optimizer.optim.state_dict()",
            ranks=tuple(failed),
        )
