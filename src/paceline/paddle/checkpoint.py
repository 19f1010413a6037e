"""Paddle's implementation of `CheckpointOps`."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.paddle import internals
from paceline.paddle.ops import OPS


class PaddleCheckpointOps(CheckpointOps):
    """See `CheckpointOps`."""

    framework = "paddle"
    suffix = ".pdparams"
    containers = (dict, OrderedDict, list, tuple)
    ops = OPS

    def why_not_saved(self, tensor: paddle.Tensor) -> str:
        return "" if tensor.is_dense() else "is sparse"

    def state_of(self, item: Any) -> Any:
        """Includes state that was loaded but not used by a step yet, as for frozen parameters; Paddle leaves
        it out.
        """
        state, unused = item.state_dict(), internals.loaded_and_unused(item)
        return {**unused, **state} if unused else state

    def random_states(self, parameters: Iterable[paddle.Tensor]) -> dict[str, bytes]:
        return {
            name: json.dumps(internals.generator_states(device)).encode()
            for name, device in _devices(parameters)
        }

    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[paddle.Tensor]) -> None:
        for name, device in _devices(parameters):
            if name in states:
                internals.set_generator_states(device, json.loads(states[name]))

    def seed(self, number: int) -> None:
        paddle.seed(number)

    def strides(self, tensor: paddle.Tensor) -> list[int] | None:
        return None

    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None,
    ) -> paddle.Tensor:
        return OPS.over(memory, at, nbytes, getattr(paddle, dtype), shape)

    def version(self) -> str:
        return str(paddle.__version__)

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        paddle.save(dict(state), str(path))

    def load(self, path: Path) -> Any:
        """Not with paddle.load, which runs any code that a pickle names."""
        with path.open("rb") as file:
            return _with_tensors(_ArraysOnly(file).load())


class _ArraysOnly(pickle.Unpickler):
    """Unpickles only what paddle.save writes: tensors, as pairs of a name and an array, and plain values."""

    _ALLOWED = frozenset(
        {
            ("builtins", "tuple"),
            ("builtins", "complex"),
            ("collections", "OrderedDict"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not what a checkpoint holds")
        return super().find_class(module, name)


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)({key: _with_tensors(each) for key, each in value.items()})
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray):
        return OPS.from_array(value[1])  # bfloat16 is saved as uint16
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(each) for each in value)
    return value


def _devices(parameters: Iterable[paddle.Tensor]) -> list[tuple[str, str | None]]:
    """The CPU, and the device that this process uses, if parameters are on one."""
    is_on_host = all(parameter.place.is_cpu_place() for parameter in parameters)
    return [("paddle cpu", "cpu")] if is_on_host else [("paddle cpu", "cpu"), ("paddle device", None)]


CHECKPOINT_OPS = PaddleCheckpointOps()
