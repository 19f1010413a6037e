"""The gradient buffer as Paddle tensors: each gradient's place, shaped like its parameter.

Two kinds of memory: what `_core.Reducer` shares between the ranks of a host, and ordinary tensors, one for
each section of the plan.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paceline.paddle import internals
from paceline.paddle.model.parameters import DTYPES
from paceline.reducer.plan import Plan, bucket_in


def shared_places(
    plan: Plan, parameters: Sequence[paddle.Tensor], pointer: int, owner: object
) -> list[paddle.Tensor]:
    """Each parameter's place, by index, in the bytes at `pointer`.

    Every one keeps `owner` alive, and so the memory.
    """
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


class GradientBuffer:
    """A gradient buffer in memory of this rank alone, on the parameters' own device, filled with zeros.

    Attributes:
        sections: One flat tensor for each section of the plan.
        places: Each parameter's place, by index.
    """

    def __init__(self, plan: Plan, parameters: Sequence[paddle.Tensor]) -> None:
        self.plan = plan
        self.sections = [
            internals.empty_on(
                parameters[0].place,
                [(section.end_byte - section.begin_byte) // section.itemsize],
                DTYPES[section.dtype],
            ).zero_()
            for section in plan.sections
        ]
        self.places = [self._place(index, parameter) for index, parameter in enumerate(parameters)]

    def bucket(self, number: int) -> paddle.Tensor:
        """All elements of a bucket, flat."""
        return bucket_in(self.plan, self.sections, number)

    def _place(self, index: int, parameter: paddle.Tensor) -> paddle.Tensor:
        spec, offset = self.plan.parameters[index], self.plan.offsets[index]
        if spec.numel == 0:
            return _nothing(parameter)
        number = next(n for n, s in enumerate(self.plan.sections) if s.begin_byte <= offset < s.end_byte)
        section = self.plan.sections[number]
        first = (offset - section.begin_byte) // section.itemsize
        return self.sections[number][first : first + spec.numel].reshape(parameter.shape)


def _nothing(parameter: paddle.Tensor) -> paddle.Tensor:
    return internals.empty_on(parameter.place, parameter.shape, parameter.dtype).zero_()
