"""Checks the arguments of the samplers, and the states that are loaded into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.arguments import Arguments, show
from paceline.errors import ConfigError

_SEED_HINT = "any whole number, the same on all ranks"

_NEEDED = ("version", "sampler", "epoch", "position", "is_complete")
# For each field: its name in messages, and what to do if it differs.
_MEANING = {
    "length": ("the data set's length", "the data set has changed since; start the epoch anew"),
    "dataset": ("the data set", 'the same data under another name? Give both samplers one dataset_id="..."'),
    "seed": ("the seed", "pass the seed that the state was made with"),
}


def seed_of(name: str, seed: int) -> int:
    """A seed as Python's own int, so that a state can be stored as JSON."""
    return Arguments(name).whole("seed", seed, hint=_SEED_HINT)


def length_of(name: str, dataset: object) -> int:
    """Number of samples."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise Arguments(name).refuse(
            "dataset",
            dataset,
            "something that has a length",
            "a class? Pass an instance"
            if isinstance(dataset, type)
            else "for iterable data without a length: paceline.data.DistributedStream",
            is_type=True,
            got=f"{type(dataset).__qualname__}, which has none",
        ) from None


def row_of(name: str, argument: str, values: object, expected: str) -> npt.NDArray[Any]:
    """An array of one dimension."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise _no_row(name, argument, values, expected, str(error)) from None
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        # An empty list has no type of its own.
        if array.ndim == 1 and array.size == 0:
            return array
        raise _no_row(name, argument, values, expected, f"{array.dtype}, shape {array.shape}")
    return array


def _no_row(name: str, argument: str, values: object, expected: str, seen: str) -> ConfigError:
    return Arguments(name).refuse(
        argument, values, expected, f"one list or array of numbers as {argument}", is_type=True, seen=seen
    )


def identify(name: str, dataset: object, dataset_id: str | None) -> str:
    """The identity of a data set in a state: the name that the user gave, else its fingerprint or type."""
    if not (dataset_id is None or (isinstance(dataset_id, str) and not dataset_id)):
        return Arguments(name).text("dataset_id", dataset_id, hint='a name of the data: dataset_id="train"')
    fingerprint = getattr(dataset, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else type(dataset).__qualname__


def check_state(name: str, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise unless `state` was made by a sampler of this name and identity."""
    check = Arguments(f"{name}.load_state_dict")
    if not isinstance(state, Mapping):
        raise check.refuse(
            "state", state, "what state_dict() returned", "load the checkpoint first", is_type=True
        )
    missing = [key for key in (*_NEEDED, *identity) if key not in state]
    if state.get("sampler", name) != name:
        raise ConfigError(
            f"{name}: the state was saved by another kind of sampler.",
            expected=name,
            got=str(state["sampler"]),
            hint=f"make a {state['sampler']} to go on from it",
        )
    if missing:
        raise ConfigError(
            f"{name}.load_state_dict: state is no state of a sampler.",
            expected="what state_dict() returned",
            got=f"{show(state)}, without {', '.join(missing)}",
            hint="pass the sampler's own part of the checkpoint",
            argument="state",
        )
    if state["version"] != 1:
        raise ConfigError(
            f"{name}: the state has a format that this version does not know.",
            expected="version 1",
            got=f"version {show(state['version'])}",
            hint="load it with the Paceline that saved it, or a newer one",
        )
    for key, ours in identity.items():
        if state[key] != ours:
            meaning, hint = _MEANING.get(key, (key, f"make the sampler with the same {key}"))
            raise ConfigError(
                f"{name}: the state does not fit: {meaning} differs.",
                expected=f"{key}={state[key]!r}, as when the state was saved",
                got=f"{key}={ours!r}",
                hint=hint,
                saved=state[key],
                current=ours,
            )
    _check_position(name, state, int(identity["length"]))


def _check_position(name: str, state: Mapping[str, Any], length: int) -> None:
    for key, most in (("epoch", None), ("position", length)):
        value = state[key]
        hint = "the state was changed, or saved by something else: start the epoch anew"
        Arguments(f"{name}.load_state_dict").whole(f"state[{key!r}]", value, least=0, most=most, hint=hint)
