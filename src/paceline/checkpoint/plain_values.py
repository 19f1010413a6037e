"""The values that a checkpoint may hold: tensors, numbers, texts, and lists, tuples, sets and dicts of these.

So a checkpoint file can be read without running code that is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.errors import ConfigError


def plain(value: Any, ops: CheckpointOps, what: str, where: str = "") -> Any:
    """Replace numpy's numbers by Python's, and mappings and sequences of other classes by plain ones.

    Args:
        value: A state_dict.
        ops: The framework's operations.
        what: What the value is, for errors: "the state of 'optimizer'".
        where: The place of the value within it, for errors.

    Raises:
        ConfigError: It holds any other object.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, ops.ops.tensor):
        if why := ops.why_not_saved(value):
            raise _refused(what, where, f"a tensor that {why}")
        return value
    if isinstance(value, np.generic):
        return plain(value.item(), ops, what, where)
    kind: Any = type(value) if type(value) in ops.containers else None
    if isinstance(value, Mapping):
        entries = {
            plain(key, ops, what, f"{where}[{key!r}]"): plain(each, ops, what, f"{where}[{key!r}]")
            for key, each in value.items()
        }
        return (kind or dict)(entries)
    if isinstance(value, (list, tuple)) or kind is set:
        parts = [plain(each, ops, what, f"{where}[{place}]") for place, each in enumerate(value)]
        return (kind or (tuple if isinstance(value, tuple) else list))(parts)
    raise _refused(what, where, f"an object of the class {type(value).__name__}")


def _refused(what: str, where: str, seen: str) -> ConfigError:
    return ConfigError(
        f"training_state: {what} can't be saved.",
        where=f"{where} of it" if where else "",
        seen=seen,
        expected="dense tensors, numbers, texts, and lists, tuples, sets and dicts of these",
        hint="register an object whose state_dict() returns such values: one of your own that puts them into "
        "tensors, say",
    )
