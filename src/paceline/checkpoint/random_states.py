"""The states of one process's random number generators: Python's, numpy's and the framework's.

They are bytes by name. Python's and numpy's are JSON, which keeps each number exactly.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.rendezvous.messages import join_payloads, split_payloads

_PYTHON, _NUMPY = "python", "numpy"


def random_states(ops: CheckpointOps, parameters: Iterable[Any]) -> dict[str, bytes]:
    """The states of the generators of this process."""
    numpys = np.random.get_state(legacy=False)
    return {
        _PYTHON: json.dumps(random.getstate()).encode(),
        _NUMPY: json.dumps(numpys, default=lambda value: value.tolist()).encode(),
        **ops.random_states(parameters),
    }


def set_random_states(ops: CheckpointOps, states: Mapping[str, bytes], parameters: Iterable[Any]) -> None:
    """Restore the generators of this process from these states."""
    version, numbers, gauss = json.loads(states[_PYTHON])
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(_with_arrays(json.loads(states[_NUMPY])))
    ops.set_random_states(states, parameters)


def pack(states: Mapping[str, bytes]) -> bytes:
    """The states as one message."""
    return join_payloads([json.dumps(list(states)).encode(), *states.values()])


def unpack(message: bytes) -> dict[str, bytes]:
    """The states that `pack` has joined; raises ValueError for any other message."""
    end = 8 + int.from_bytes(message[:8], "little")
    names: Sequence[str] = json.loads(message[8:end])
    return dict(zip(names, split_payloads(message, 1 + len(names))[1:]))


def _with_arrays(state: Any) -> Any:
    """numpy's state with arrays instead of the lists that JSON has."""
    if isinstance(state, dict):
        return {key: _with_arrays(value) for key, value in state.items()}
    return np.array(state, np.uint64) if isinstance(state, list) else state
