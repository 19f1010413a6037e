"""The accelerator for GPU tests: a GPU, or a stand-in if PACELINE_TEST_DEVICE is set.

The stand-in (`tests/device/torch`) executes its work asynchronously, as a GPU does, and needs no GPU: `make
test-device`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from paceline.torch.communicator import local_group
from tests.device import torch as device

IS_CUDA = torch.cuda.is_available()
IS_THERE = IS_CUDA or bool(os.environ.get("PACELINE_TEST_DEVICE"))
KIND = device.NAME if IS_THERE and not IS_CUDA else "cuda"
NCCL = "nccl" if IS_CUDA else device.NCCL
"""A process group whose collectives run on a stream of the device."""
GLOO = "gloo" if IS_CUDA else device.GLOO
"""A process group whose collectives the caller has to wait for."""
GLOO_AND_NCCL = "cpu:gloo,cuda:nccl" if IS_CUDA else device.NCCL
needed = pytest.mark.skipif(not IS_THERE, reason="needs a GPU")
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs a GPU")

_library: Any = None
if IS_THERE and not IS_CUDA:
    _library = device.begin()

    def _backend(
        engine: str, store: Any, name: str, place: int, world_ranks: list[int], timeout: timedelta
    ) -> Any:
        return device.group(engine, store, place, len(world_ranks), timeout)

    local_group._make_backend = _backend


def module() -> Any:
    """torch.cuda, or the module of the stand-in device."""
    return torch.get_device_module(KIND)


def count() -> int:
    """The number of devices."""
    return int(module().device_count()) if IS_THERE else 0


def busy(milliseconds: int) -> None:
    """Give the current stream work that lasts until the test is ahead of it."""
    if IS_CUDA:
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # type: ignore[no-untyped-call]
    else:
        _library.sleep(milliseconds)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which every wait for the device raises."""
    module().synchronize()
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("error")
    else:
        _library.forbid_waiting(True)
    try:
        yield
    finally:
        if IS_CUDA:
            torch.cuda.set_sync_debug_mode("default")
        else:
            _library.forbid_waiting(False)
