"""The gradient buffer of a rank as tensors of a framework, one for each section of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from paceline.reducer.plan import Plan, bucket_in

_Tensor = TypeVar("_Tensor")


class GradientBuffer(Generic[_Tensor]):
    """The gradients of a model in flat memory; `places` has the place of each parameter, by index."""

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[_Tensor],
        sections: Sequence[Any],
        place: Callable[[Any, int, int, _Tensor], _Tensor],
    ) -> None:
        self.plan, self.sections = plan, list(sections)
        self._where = [self._find(index) for index in range(len(parameters))]
        self.places = [
            place(self.sections[number], first, plan.parameters[index].numel, parameters[index])
            for index, (number, first) in enumerate(self._where)
        ]

    def bucket(self, number: int) -> Any:
        return bucket_in(self.plan, self.sections, number)

    def addresses(self) -> list[int]:
        sections = self.plan.sections
        return [
            self.sections[number].data_ptr() + first * sections[number].itemsize
            for number, first in self._where
        ]

    def _find(self, index: int) -> tuple[int, int]:
        spec, offset = self.plan.parameters[index], self.plan.offsets[index]
        return next(
            (number, (offset - section.begin_byte) // section.itemsize)
            for number, section in enumerate(self.plan.sections)
            if (section.dtype, section.device) == (spec.dtype, spec.device)
            and section.begin_byte <= offset <= section.end_byte - spec.nbytes
        )
