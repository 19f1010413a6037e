"""torch's side of `CheckpointOps`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.torch.model.inner_tensors import PLAIN_CLASSES
from paceline.torch.ops import OPS

_CPU = "torch"


class TorchCheckpointOps(CheckpointOps):
    """See `CheckpointOps`."""

    framework = "torch"
    ops = OPS

    def why_not_saved(self, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided:
            return f"is sparse ({tensor.layout})"
        is_plain = type(tensor) in PLAIN_CLASSES and not tensor.is_quantized and not tensor.is_nested
        if not is_plain or tensor.is_meta:
            return f"is not one of torch's own ({type(tensor).__name__} on {tensor.device}, {tensor.dtype})"
        return ""

    def random_states(self, parameters: Iterable[torch.Tensor]) -> dict[str, bytes]:
        states = {_CPU: torch.get_rng_state()}
        for name, device in _devices(parameters):
            states[name] = getattr(torch, device.type).get_rng_state(device)
        return {name: state.cpu().numpy().tobytes() for name, state in states.items()}

    def set_random_states(self, states: Mapping[str, bytes], parameters: Iterable[torch.Tensor]) -> None:
        torch.set_rng_state(_as_tensor(states[_CPU]))
        for name, device in _devices(parameters):
            if name in states:
                getattr(torch, device.type).set_rng_state(_as_tensor(states[name]), device)


def _devices(parameters: Iterable[torch.Tensor]) -> list[tuple[str, Any]]:
    """Those that have generators, with names that do not say which of a host's devices a rank uses."""
    devices = sorted({each.device for each in parameters if not each.is_cpu}, key=str)
    known = [each for each in devices if hasattr(getattr(torch, each.type, None), "set_rng_state")]
    return [(f"torch {device.type} {number}", device) for number, device in enumerate(known)]


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(state, np.uint8).copy())


CHECKPOINT_OPS = TorchCheckpointOps()
