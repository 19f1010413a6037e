"""What communicators ask of Paddle's tensors; see `CommunicatorOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paceline.paddle import internals
from paceline.paddle.communicator.calls import copy as copy
from paceline.paddle.communicator.comm_hook import PaddleHook
from paceline.paddle.communicator.transport import PaddleTransport
from paceline.paddle.model.parameters import DTYPES, dtype_name, nbytes
from paceline.reducer.communicator import Communicator, Reduction
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.plan import Plan

make_hooked, make_transport = PaddleHook, PaddleTransport
DEVICE = "a device"
HOW_TO_FORM_A_GROUP = "call paddle.distributed.init_parallel_env() before, and leave out the group"


def plain_tensors(tensors: Sequence[paddle.Tensor]) -> Sequence[paddle.Tensor]:
    return [tensor for tensor in tensors if tensor.size]


def on_host(tensor: paddle.Tensor) -> paddle.Tensor:
    with paddle.no_grad():
        held = tensor if tensor.place.is_cpu_place() else tensor.cpu()
        return held if held.is_contiguous() else held.contiguous()


def place_of(tensor: paddle.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), nbytes(tensor)


def kind_of(tensor: paddle.Tensor) -> tuple[str, int]:
    return dtype_name(tensor.dtype), int(tensor.size)


def as_array(tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
    return np.array(tensor.numpy())


def from_array(array: np.ndarray[Any, Any]) -> paddle.Tensor:
    return paddle.to_tensor(array, place=paddle.CPUPlace())


def places_at(
    plan: Plan, parameters: Sequence[paddle.Tensor], pointer: int, owner: object
) -> list[paddle.Tensor]:
    """See `CommunicatorOps`."""
    memory = (ctypes.c_char * max(1, plan.buffer_bytes)).from_address(pointer)
    memory.owner = owner  # type: ignore[attr-defined]
    array: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
    found = []
    for spec, offset, parameter in zip(plan.parameters, plan.offsets, parameters):
        if spec.numel == 0:
            found.append(_nothing(parameter))
            continue
        # Cut in numpy: paddle.view(tensor[a:b], dtype) counts `a` in elements of the new type.
        flat = internals.over(array[offset : offset + spec.nbytes], DTYPES[spec.dtype])
        found.append(flat.reshape(parameter.shape))
    return found


def allocate(
    plan: Plan, parameters: Sequence[paddle.Tensor], instead_of: Reduction[paddle.Tensor] | None = None
) -> GradientBuffer[paddle.Tensor]:
    """See `CommunicatorOps`."""
    sections = [
        internals.empty_on(
            parameters[0].place,
            [(section.end_byte - section.begin_byte) // section.itemsize],
            DTYPES[section.dtype],
        ).zero_()
        for section in plan.sections
    ]
    return GradientBuffer(plan, parameters, sections, _place)


def _place(section: paddle.Tensor, first: int, count: int, parameter: paddle.Tensor) -> paddle.Tensor:
    return section[first : first + count].reshape(parameter.shape) if count else _nothing(parameter)


def _nothing(parameter: paddle.Tensor) -> paddle.Tensor:
    return internals.empty_on(parameter.place, parameter.shape, parameter.dtype).zero_()


def average_buffers(
    through: Communicator[paddle.Tensor], buffers: Sequence[paddle.Tensor], active: Sequence[int]
) -> None:
    """Replace each buffer by its mean over the ranks `active`, summed in float32 or wider. Collective."""
    with paddle.no_grad():
        for buffer in buffers:
            dtype = "float64" if buffer.dtype == paddle.float64 else "float32"
            wide = buffer.astype(dtype).contiguous() * float(through.rank in active)
            through.sum(wide)
            paddle.assign((wide / len(active)).astype(buffer.dtype), buffer)
