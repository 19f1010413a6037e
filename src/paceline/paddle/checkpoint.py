"""Paddle's side of `CheckpointOps`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import paddle

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.paddle import internals
from paceline.paddle.ops import OPS


class PaddleCheckpointOps(CheckpointOps):
    """See `CheckpointOps`."""

    framework = "paddle"
    ops = OPS

    def why_not_saved(self, tensor: paddle.Tensor) -> str:
        return "" if tensor.is_dense() else "is sparse"

    def random_states(self, parameters: Iterable[paddle.Tensor]) -> dict[str, bytes]:
        return {
            name: json.dumps(internals.generator_states(device)).encode()
            for name, device in _devices(parameters)
        }

    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[paddle.Tensor]) -> None:
        for name, device in _devices(parameters):
            if name in states:
                internals.set_generator_states(device, json.loads(states[name]))


def _devices(parameters: Iterable[paddle.Tensor]) -> list[tuple[str, str | None]]:
    """The CPU, and the device that this process drives."""
    is_on_host = all(parameter.place.is_cpu_place() for parameter in parameters)
    return [("paddle cpu", "cpu")] if is_on_host else [("paddle cpu", "cpu"), ("paddle device", None)]


CHECKPOINT_OPS = PaddleCheckpointOps()
