"""Which streams of a device have made gradients, so that what averages them waits for all of these.

Autograd runs a node of backward on the stream of its forward, and a model may run parts of its
forward on several. A bucket is launched on the stream of its last gradient. That stream waits for the others
that have brought gradients in this backward; with one stream, as nearly always, there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Streams:
    """The streams that have brought gradients in the backward under way. Calls come one at a time."""

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
        if self._last is None or number != self._last:  # torch's streams call themselves equal to None
            self._last = number
            stream = self._current(None)
            if stream not in self._seen:
                self._seen.append(stream)

    def join(self, device: torch.device, waiting: Iterable[torch.Tensor] = ()) -> None:
        """Let the current stream of `device` wait for the others."""
        if len(self._seen) < 2:  # the one that has brought the last gradient is the current one
            return
        current = self._current(device)
        others = [each for each in self._seen if each != current and each.device == current.device]
        for stream in others:
            current.wait_stream(stream)
        if others:
            for tensor in waiting:
                tensor.record_stream(current)  # its memory is not to be used again before

    def forget(self) -> None:
        self._last = None
        self._seen.clear()


def _number_on_cuda() -> object:
    device = torch._C._cuda_getDevice()
    return torch._C._cuda_getCurrentRawStream(device) + device  # the default streams of all devices are 0
