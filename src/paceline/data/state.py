"""States of samplers: whether one fits the sampler that is to go on from it. Imports errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError

_NEEDED = ("version", "sampler", "epoch", "position", "is_complete")
# In the words of a user, and what to do when they differ.
_MEANING = {
    "length": ("the data set's length", "the data set has changed since; start the epoch anew"),
    "dataset": ("the data set", 'the same data under another name? Give both samplers one dataset_id="..."'),
    "seed": ("the seed", "pass the seed that the state was made with"),
}


def identify(dataset: object) -> str:
    """What a state knows a data set by: its fingerprint, where it has one (Hugging Face), else its type."""
    fingerprint = getattr(dataset, "_fingerprint", None)
    return fingerprint if isinstance(fingerprint, str) else type(dataset).__qualname__


def check_state(name: str, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise unless `state` was made by such a sampler.

    Args:
        name: Of the sampler's class.
        state: What `load_state_dict` got.
        identity: What must agree.

    Raises:
        ConfigError: It does not fit; says in what, with both values.
    """
    missing = [key for key in (*_NEEDED, *identity) if not isinstance(state, Mapping) or key not in state]
    if isinstance(state, Mapping) and state.get("sampler", name) != name:
        raise ConfigError(
            f"{name}: the state was saved by another kind of sampler.",
            expected=name,
            got=str(state["sampler"]),
        )
    if missing:
        raise ConfigError(
            f"{name}: this is no state of a sampler.",
            expected="what state_dict() returned",
            got=f"without {', '.join(missing)}",
        )
    if state["version"] != 1:
        raise ConfigError(
            f"{name}: the state has a format that this version does not know.",
            expected="version 1",
            got=f"version {state['version']}",
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
        if not isinstance(value, int) or value < 0 or (most is not None and value > most):
            raise ConfigError(
                f"{name}: the state's {key} is out of range.",
                expected="0 or more" if most is None else f"0 to {most}",
                got=repr(value),
            )
