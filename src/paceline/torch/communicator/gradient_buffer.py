"""The gradient buffer as tensors of torch, in memory that the ranks of a host share, or of one rank alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from paceline.reducer.communicator import Reduction
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.plan import Plan
from paceline.torch.model.inner_tensors import is_dense as is_dense
from paceline.torch.model.parameters import DTYPES


def buffer_at(
    plan: Plan, parameters: Sequence[torch.Tensor], pointer: int, owner: object
) -> GradientBuffer[torch.Tensor]:
    """A gradient buffer in the memory at `pointer`; every view keeps `owner` alive, which keeps it mapped."""
    memory = (ctypes.c_char * max(1, plan.buffer_bytes)).from_address(pointer)
    memory.owner = owner  # type: ignore[attr-defined]
    sections = []
    for section in plan.sections:
        count, dtype = (section.end_byte - section.begin_byte) // section.itemsize, DTYPES[section.dtype]
        sections.append(
            torch.frombuffer(memory, dtype=dtype, count=count, offset=section.begin_byte)
            if count
            else torch.empty(0, dtype=dtype)
        )
    return GradientBuffer(plan, parameters, sections, _place)


def allocate(
    plan: Plan, parameters: Sequence[torch.Tensor], instead_of: Reduction[torch.Tensor] | None = None
) -> GradientBuffer[torch.Tensor]:
    """See `CommunicatorOps`: another order of the same parameters has sections of the same sizes."""
    if instead_of is not None:
        before = zip(instead_of.plan.sections, instead_of.sections)
        kinds = {(section.dtype, section.device): memory for section, memory in before}
        sections = [kinds[section.dtype, section.device].zero_() for section in plan.sections]
    else:
        sections = [
            torch.zeros(
                (section.end_byte - section.begin_byte) // section.itemsize,
                dtype=DTYPES[section.dtype],
                device=section.device,
            )
            for section in plan.sections
        ]
    return GradientBuffer(plan, parameters, sections, _place)


def _place(section: torch.Tensor, first: int, count: int, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient's place, as the parameter lies in memory, so that autograd's layout of the gradient fits."""
    place = section[first : first + count]
    if count and parameter.is_complex() and not place.is_complex():
        place = torch.view_as_complex(place.view(-1, 2))
    if count and is_dense(parameter):
        place = place.as_strided(parameter.shape, parameter.stride())
    elif count or not parameter.numel():  # else a sparse gradient, which lies elsewhere
        place = place.view(parameter.shape)
    return place.data  # with a count of changes of its own, where views share that of their base


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last; of no memory that other tensors have."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize
