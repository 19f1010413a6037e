"""The gradient buffer as tensors: each gradient's place, shaped and strided like its parameter.

Two kinds of memory: what `_core.Reducer` shares between the ranks of a host, and ordinary tensors, one for
each section of the plan. Either way a gradient's place is one view.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from paceline.reducer.plan import Plan, bucket_in
from paceline.torch.model.inner_tensors import is_dense as is_dense
from paceline.torch.model.parameters import DTYPES


class GradientBuffer:
    """The gradients of a model in flat memory.

    Attributes:
        sections: One flat tensor for each section of the plan.
        views: Each parameter's place, by index.
        pointers: The address of each place.
        waiting: Gradients, by parameter, that are still to be copied to their places. On a GPU each copy is a
            launch of a kernel, and a model of many small parameters spends its backward on them. So hooks
            only note what is to be copied, and one call copies those of a bucket once it is complete.
    """

    def __init__(
        self, plan: Plan, parameters: Sequence[torch.Tensor], sections: Sequence[torch.Tensor]
    ) -> None:
        self.plan = plan
        self.sections = list(sections)
        self.waiting: dict[int, torch.Tensor] = {}
        self.pointers: list[int] = []
        # .data: a count of changes of its own for each place, where views share that of their base.
        self.views = [self._view(index, parameter).data for index, parameter in enumerate(parameters)]
        # To copy to without counting it as a change of a gradient that lives in its place.
        self._targets = [view.data for view in self.views]

    @classmethod
    def on_memory(
        cls, plan: Plan, parameters: Sequence[torch.Tensor], pointer: int, owner: object
    ) -> GradientBuffer:
        """A gradient buffer at `pointer`; every view keeps `owner` alive, which keeps it mapped."""
        memory = (ctypes.c_char * max(1, plan.buffer_bytes)).from_address(pointer)
        memory.owner = owner  # type: ignore[attr-defined]
        sections = []
        for section in plan.sections:
            count = (section.end_byte - section.begin_byte) // section.itemsize
            dtype = DTYPES[section.dtype]
            sections.append(
                torch.frombuffer(memory, dtype=dtype, count=count, offset=section.begin_byte)
                if count
                else torch.empty(0, dtype=dtype)
            )
        return cls(plan, parameters, sections)

    @classmethod
    def allocate(
        cls,
        plan: Plan,
        parameters: Sequence[torch.Tensor],
        instead_of: tuple[Plan, Sequence[torch.Tensor]] | None = None,
    ) -> GradientBuffer:
        """A gradient buffer in memory of each section's own device, filled with zeros.

        In the sections of another plan if there is one: another order of the same parameters has sections of
        the same sizes.
        """
        if instead_of is not None:
            before, sections = instead_of
            kinds = {(s.dtype, s.device): memory for s, memory in zip(before.sections, sections)}
            return cls(plan, parameters, [kinds[s.dtype, s.device].zero_() for s in plan.sections])
        made = [
            torch.zeros(
                (section.end_byte - section.begin_byte) // section.itemsize,
                dtype=DTYPES[section.dtype],
                device=section.device,
            )
            for section in plan.sections
        ]
        return cls(plan, parameters, made)

    def bucket(self, number: int) -> torch.Tensor:
        """All elements of a bucket, flat."""
        return bucket_in(self.plan, self.sections, number)

    def take_waiting(self, bucket: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The gradients of a bucket that wait to be copied, and their places. Those of others may still come.

        A gradient that lies in several buckets comes with the first of them.
        """
        take, places, gradients = self.waiting.pop, [], []
        for index in self.plan.buckets[bucket].parameters:
            gradient = take(index, None)
            if gradient is not None:
                places.append(self._targets[index])
                gradients.append(gradient)
        return gradients, places

    def _view(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        spec = self.plan.parameters[index]
        offset = self.plan.offsets[index]
        number, section = next(
            (number, section)
            for number, section in enumerate(self.plan.sections)
            if (section.dtype, section.device) == (spec.dtype, spec.device)
            and section.begin_byte <= offset <= section.end_byte - spec.nbytes
        )
        self.pointers.append(self.sections[number].data_ptr() + offset - section.begin_byte)
        first = (offset - section.begin_byte) // section.itemsize
        place = self.sections[number][first : first + spec.numel]
        if not spec.numel:  # a sparse gradient, which lies elsewhere; or a parameter without elements
            return place if parameter.numel() else place.view(parameter.shape)
        if parameter.is_complex() and not place.is_complex():
            place = torch.view_as_complex(place.view(-1, 2))
        if is_dense(parameter):
            # As the parameter lies in memory, so that autograd's own layout of the gradient fits.
            return place.as_strided(parameter.shape, parameter.stride())
        return place.view(parameter.shape)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last; of no memory that other tensors have."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.itemsize
