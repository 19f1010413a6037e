"""Copies between a device and pinned host memory, on a stream of their own.

This is the only device-specific code on the path of a shard, so tests can replace it by a class that needs no
device. A copy waits only for the work that was queued before it: it does not wait for the rest of the
backward, and the backward does not wait for the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


class DeviceCopies:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def stream(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(self._module.current_stream(self._device))
        context: AbstractContextManager[Any] = self._module.stream(self._stream)
        return context

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        """Start a copy; the returned function says whether it is complete, without blocking."""
        target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record()
        is_there: Callable[[], bool] = event.query
        return is_there
