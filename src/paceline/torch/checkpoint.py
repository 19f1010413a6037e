"""torch's side of `CheckpointOps`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
    suffix = ".pt"
    containers = (dict, OrderedDict, Counter, list, tuple, set)
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

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Before CUDA is initialised, torch would keep this call for later, with the stack: a millisecond.
            torch.cuda.manual_seed_all(number)

    def strides(self, tensor: torch.Tensor) -> list[int] | None:
        return None if tensor.is_contiguous() or not OPS.is_dense(tensor) else list(tensor.stride())

    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None,
    ) -> torch.Tensor:
        found = OPS.over(memory, at, nbytes, getattr(torch, dtype), shape)
        return found if strides is None else found.as_strided(tuple(shape), tuple(strides))

    def version(self) -> str:
        return torch.__version__

    def save(self, state: Mapping[str, Any], path: Path) -> None:
        torch.save(dict(state), path)

    def load(self, path: Path) -> Any:
        return torch.load(path, map_location="cpu", weights_only=True)


def _devices(parameters: Iterable[torch.Tensor]) -> list[tuple[str, Any]]:
    """Devices with random generators, by names that do not depend on which devices of a host a rank uses."""
    devices = sorted({each.device for each in parameters if not each.is_cpu}, key=str)
    known = [each for each in devices if hasattr(getattr(torch, each.type, None), "set_rng_state")]
    return [(f"torch {device.type} {number}", device) for number, device in enumerate(known)]


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(state, np.uint8).copy())


CHECKPOINT_OPS = TorchCheckpointOps()
