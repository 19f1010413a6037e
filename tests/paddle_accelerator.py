"""What tests of Paddle on devices run on: GPUs, or the device of `tests/device/paddle` where it is loaded.

The latter needs none: `make test-device`.
"""

from __future__ import annotations

import os

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # before CUDA is begun: tests compare with float64

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
"""Of a group whose collectives run on a stream of the device."""


def count() -> int:
    """How many devices there are."""
    if IS_CUDA:
        return int(paddle.device.cuda.device_count())
    return len(paddle.device.get_available_custom_device()) if IS_THERE else 0


needs_two = pytest.mark.skipif(count() < 2, reason="needs two GPUs")


def assert_same_on_both(parameter: paddle.Tensor) -> None:
    """Two ranks have the same bits. Collective."""
    of_all = paddle.empty([2 * parameter.shape[0], *parameter.shape[1:]])
    paddle.distributed.stream.all_gather(of_all, parameter)
    assert_array_equal(*np.split(of_all.numpy(), 2))


def join(rank: int) -> None:
    """Have this rank compute on its own device, and initialise paddle.distributed over it."""
    os.environ[f"FLAGS_selected_{KIND}s"] = str(rank)
    paddle.set_device(f"{KIND}:{rank}")
    join_paddle(rank, backend=BACKEND)
