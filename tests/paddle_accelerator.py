"""The accelerator for Paddle's device tests: GPUs, or a stand-in if it is loaded.

The stand-in (`tests/device/paddle`) needs no GPU: `make test-device`.
"""

from __future__ import annotations

import os

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # before CUDA is initialised: tests compare with float64

import numpy as np
import paddle
import pytest
from numpy.testing import assert_array_equal

from tests.device import paddle as device
from tests.multiprocess.paddle_models import join_paddle

IS_CUDA = bool(paddle.device.is_compiled_with_cuda()) and paddle.device.cuda.device_count() > 0
IS_THERE = IS_CUDA or device.IS_THERE
KIND = "gpu" if IS_CUDA else device.NAME
BACKEND = "nccl" if IS_CUDA else device.BACKEND
"""The backend of a group whose collectives run on a stream of the device."""


def count() -> int:
    """The number of devices."""
    if IS_CUDA:
        return int(paddle.device.cuda.device_count())
    return len(paddle.device.get_available_custom_device()) if IS_THERE else 0


needs_two = pytest.mark.skipif(count() < 2, reason="needs two GPUs")


def assert_same_on_both(parameter: paddle.Tensor) -> None:
    """Assert that two ranks have the same bits. Collective."""
    of_all = paddle.empty([2 * parameter.shape[0], *parameter.shape[1:]])
    paddle.distributed.stream.all_gather(of_all, parameter)
    assert_array_equal(*np.split(of_all.numpy(), 2))


def join(rank: int) -> None:
    """Make this rank compute on its own device, and initialise paddle.distributed over it."""
    os.environ[f"FLAGS_selected_{KIND}s"] = str(rank)
    paddle.set_device(f"{KIND}:{rank}")
    join_paddle(rank, backend=BACKEND)
