"""The arena as Paddle tensors: each gradient's place in the memory that the ranks share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paceline.reducer.plan import Plan

DTYPES = {
    "float32": paddle.float32,
    "float64": paddle.float64,
    "float16": paddle.float16,
    "bfloat16": paddle.bfloat16,
}
"""Gradients that the reducer averages."""


def dtype_name(dtype: paddle.dtype) -> str:
    """As numpy spells it.

    Example:
        >>> dtype_name(paddle.float32)
        'float32'
    """
    return str(dtype).removeprefix("paddle.")


def places(
    plan: Plan, parameters: Sequence[paddle.Tensor], pointer: int, owner: object
) -> list[paddle.Tensor]:
    """Each parameter's place, by index, shaped like it; every one keeps `owner` alive, and so the memory."""
    memory = (ctypes.c_char * max(1, plan.arena_bytes)).from_address(pointer)
    memory.owner = owner  # type: ignore[attr-defined]
    array: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    found = []
    for spec, offset, parameter in zip(plan.parameters, plan.offsets, parameters):
        if spec.numel == 0:
            found.append(paddle.zeros(parameter.shape, DTYPES[spec.dtype]))
            continue
        # Cut in numpy: paddle.view(tensor[a:b], dtype) counts `a` in elements of the new type.
        flat = paddle.from_dlpack(array[offset : offset + spec.nbytes])
        found.append(paddle.view(flat, DTYPES[spec.dtype]).reshape(parameter.shape))
    return found
