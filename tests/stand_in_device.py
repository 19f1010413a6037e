"""Treats gradients as if they were on a device: tensors of the CPU, and Gloo within each host.

The features that only a device has (pinned memory, streams, events) are replaced. All other code is the code
that runs on GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.torch.communicator import connect as communicator
from paceline.torch.ddp import distributed


class CopiesOnHost:
    """Replaces `DeviceCopies`. A copy to the host is complete at its second query."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self._pinned: list[torch.Tensor] = []
        self._is_in_stream = False

    def memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._pinned.append(torch.full((numel,), float("nan"), dtype=dtype))
        return self._pinned[-1]

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        self._is_in_stream = True
        yield
        self._is_in_stream = False

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], bool]:
        assert self._is_in_stream
        if all(target is not each for each in self._pinned):
            target.copy_(source)  # later work on the stream sees it
            return lambda: True
        target.fill_(float("nan"))
        asked: list[int] = []

        def is_there() -> bool:
            asked.append(1)
            if len(asked) == 2:
                target.copy_(source)
            return len(asked) > 1

        return is_there


def be_a_device(patch: pytest.MonkeyPatch) -> None:
    """Make models on the CPU use the path of models on GPUs, on this rank, if reduce_through asks for it."""

    def connect(peers: Any, **options: Any) -> Any:
        return communicator.connect(peers, **{**options, "on_host": False})

    patch.setattr(distributed, "connect", connect)
    patch.setattr(communicator, "DeviceCopies", CopiesOnHost)
