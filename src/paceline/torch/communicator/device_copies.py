"""Copies between a device and pinned memory of the host, on a stream of their own.

All that is special to a device in the way of a shard stands here, so that tests can put
something in its place that needs none. The stream is behind what is asked of it alone: copies do not wait for
the rest of the backward, and the backward does not wait for them.
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
        """Returns what says whether it is there; asking does not wait."""
        target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record()
        is_there: Callable[[], bool] = event.query
        return is_there
