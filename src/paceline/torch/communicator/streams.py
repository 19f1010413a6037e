"""Tracks which streams of a device have produced gradients, so that the all-reduce waits for all of them.

Autograd runs a node of backward on the stream of its forward, and a model may run its forward on several
streams. A bucket is launched on the stream of its last gradient. That stream waits for the others that have
produced gradients in this backward. With one stream, the usual case, there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Streams:
    """The streams that have produced gradients in the current backward. Calls must come one at a time."""

    def __init__(
        self, current: Callable[[torch.device | None], Any], number: Callable[[], object] | None = None
    ) -> None:
        self._current = current
        self._number = (lambda: current(None)) if number is None else number
        self._last: object = None
        self._seen: list[Any] = []

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            return cls(torch.accelerator.current_stream)
        return cls(torch.cuda.current_stream, _number_on_cuda)

    def note(self) -> None:
        number = self._number()
        if self._last is None or number != self._last:  # torch's streams compare equal to None
            self._last = number
            stream = self._current(None)
            if stream not in self._seen:
                self._seen.append(stream)

    def join(self, device: torch.device, waiting: Iterable[torch.Tensor] = ()) -> None:
        """Make the current stream of `device` wait for the others."""
        if len(self._seen) < 2:  # the stream of the last gradient is the current one
            return
        current = self._current(device)
        others = [each for each in self._seen if each != current and each.device == current.device]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for tensor in waiting:
                tensor.record_stream(current)  # its memory must not be used again before

    def forget(self) -> None:
        self._last = None
        self._seen.clear()


def _number_on_cuda() -> object:
    device = torch._C._cuda_getDevice()
    # The default stream is 0 on every device, so the device's number is added.
    return torch._C._cuda_getCurrentRawStream(device) + device
