"""Assembles an optimizer's whole state, as an unsharded optimizer would have it, from the pieces of all
ranks.

State of a cut parameter that has the shape of the piece is cut like it; all other state (the step count) is
the same for every piece. An optimizer's state may be nested, so it is sent as a JSON description that refers
to tensors by number, followed by the tensors. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.reducer.communicator import Communicator
from paceline.reducer.framework_ops import FrameworkOps, Tensor, dtype_name
from paceline.sharding.optimizer_arguments import OWNER
from paceline.sharding.partition import Piece
from paceline.sharding.shards import Shards, part_of

Whole = dict[int, dict[Any, Any]]
"""The state that an unsharded optimizer would have for each parameter, by the parameter's number."""


def gather_states(
    shards: Shards[Tensor],
    held_of: Callable[[int], Mapping[Any, Any] | None],
    communicator: Communicator[Tensor] | None,
    to: int,
) -> Iterator[tuple[int, Mapping[Any, Any]]]:
    """Gather the states of all pieces on one rank. Collective; each rank must exhaust the iterator.

    Returns:
        The number of each piece and its state on the rank `to`; nothing on other ranks.

    Raises:
        ConfigError: A state holds something else than tensors and plain values, so it cannot be sent.
    """
    tree, tensors, failure = _describe(shards, held_of)
    forms = [[list(each.shape), dtype_name(each)] for each in tensors]
    payload = json.dumps([tree, forms, failure]).encode()
    reported = [
        json.loads(each) for each in (communicator.all_gather(payload) if communicator else [payload])
    ]
    _raise_failures([failure for _, _, failure in reported])
    for rank, (tree, forms, _) in enumerate(reported):
        values = tensors
        if rank != shards.rank:
            like = shards.parameters[0]
            values = [shards.ops.empty(shape, dtype, like) for shape, dtype in forms]
        if communicator is not None and values:
            communicator.broadcast(values, root=rank)
        if to == shards.rank:
            for number, described in tree:
                yield number, _built(described, values)


def put_together(shards: Shards[Tensor], states: Iterable[tuple[int, Mapping[Any, Any]]]) -> Whole:
    by_parameter: Whole = {}
    for number, state in states:
        piece = shards.pieces[number]
        parameter = shards.parameters[piece.parameter]
        for key, value in state.items():
            whole = by_parameter.setdefault(piece.parameter, {})
            if not is_cut(shards.ops, value, piece):
                whole[key] = shards.ops.kept_copy(value, parameter)
                continue
            if key not in whole:
                whole[key] = shards.ops.room_for_state(parameter, value.dtype)
            shards.ops.copy(value, part_of(shards.ops, whole[key], piece))
    return by_parameter


def is_cut(ops: FrameworkOps[Any], value: Any, piece: Piece) -> bool:
    """True if this state has one value for each element of a piece that is not all of its parameter."""
    is_part = not piece.is_whole and isinstance(value, ops.tensor)
    return is_part and tuple(value.shape) == (piece.end - piece.begin,)


def _describe(
    shards: Shards[Tensor], held_of: Callable[[int], Mapping[Any, Any] | None]
) -> tuple[list[tuple[int, Any]], list[Tensor], str]:
    tree: list[tuple[int, Any]] = []
    tensors: list[Tensor] = []
    for number in shards.own:
        index = shards.pieces[number].parameter
        if not (held := held_of(number)):
            continue
        try:
            tree.append((number, _spelled(held, tensors, shards.ops, shards.parameters[index])))
        except TypeError as error:
            return [], [], f"of parameter '{shards.names[index]}', the optimizer remembers {error}"
    return tree, tensors, ""


def _spelled(value: Any, tensors: list[Tensor], ops: FrameworkOps[Tensor], parameter: Tensor) -> Any:
    if isinstance(value, ops.tensor):
        # On the parameter's device, for its process group: step counts of GPU optimizers lie on the CPU.
        tensors.append(ops.beside(value, parameter))
        return ["tensor", len(tensors) - 1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, Mapping):
        entries = [
            [_spelled(key, [], ops, parameter), _spelled(each, tensors, ops, parameter)]
            for key, each in value.items()
        ]
        return ["dict", entries]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_spelled(each, tensors, ops, parameter) for each in value]]
    raise TypeError(f"an object of the class {type(value).__name__}")


def _built(described: Any, tensors: Sequence[Tensor]) -> Any:
    kind, held = described
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {_built(key, tensors): _built(each, tensors) for key, each in held}
    if kind in ("list", "tuple"):
        built = [_built(each, tensors) for each in held]
        return built if kind == "list" else tuple(built)
    return held


def _raise_failures(failures: Sequence[str]) -> None:
    failed = {rank: failure for rank, failure in enumerate(failures) if failure}
    if failed:
        raise ConfigError(
            f"{OWNER}.consolidate_state_dict: the state cannot be brought together.",
            seen="\n".join(f"rank {rank}: {failure}" for rank, failure in failed.items()),
            expected="tensors, numbers, texts, and lists, tuples and dicts of these",
            hint="save each rank's own part: optimizer.optim.state_dict()",
            ranks=tuple(failed),
        )
