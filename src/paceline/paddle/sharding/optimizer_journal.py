"""What a journal asks of Paddle's optimizers: a step of one block, and what they remember.

The one idea: Paddle knows a piece by its parameter's name, and there may be several pieces of one parameter,
each in a block of its own. So each block has an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle

from paceline.paddle import internals
from paceline.paddle.model.parameters import dtype_name
from paceline.paddle.sharding.elementwise import PaddleWorkshop, undisturbed
from paceline.paddle.sharding.whole_state import Key, make_state, remembered
from paceline.sharding.cuts import CUT_ELEMENTS
from paceline.sharding.journal_layout import Slot, no_journal

_TRIAL_STEPS = 4


class PaddlePart:
    """See `Part`.

    Args:
        tensors: The pieces of a rank as parameters, by their numbers.
        blocks: The numbers of the pieces of each block.
        optimizers: For each block one.

    Attributes:
        optimizers: Those.
    """

    def __init__(
        self,
        tensors: Mapping[int, paddle.Tensor],
        blocks: Sequence[Sequence[int]],
        optimizers: Sequence[Any],
    ) -> None:
        self._tensors, self.optimizers = tensors, optimizers
        self._block_of = {number: place for place, block in enumerate(blocks) for number in block}

    def optimizer_of(self, number: int) -> Any:
        """The optimizer that has a piece."""
        return self.optimizers[self._block_of[number]]

    def has_gradient(self, number: int) -> bool:
        tensor = self._tensors[number]
        return not tensor.stop_gradient and internals.gradient_of(tensor) is not None

    def step(self, block: int, numbers: Sequence[int]) -> None:
        self.optimizers[block].step()

    def lay(self, number: int, views: Mapping[Any, paddle.Tensor]) -> bool | None:
        held = self._held(number)
        if not held:
            return None
        if held.keys() != views.keys():
            return False
        for key, value in held.items():
            view = views[key]
            if value.dtype != view.dtype or value.shape != view.shape:
                return False
            if value.size and value.data_ptr() != view.data_ptr():
                paddle.assign(value, view)
                internals.lay_into(value, view)
        return True

    def recall(self, number: int, views: Mapping[Any, paddle.Tensor]) -> None:
        make_state(self.optimizer_of(number), self._tensors[number])
        for key, value in self._held(number).items():
            if value.size:
                internals.lay_into(value, views[key])

    def _held(self, number: int) -> dict[Key, paddle.Tensor]:
        return remembered(self.optimizer_of(number), self._tensors[number].name)


def slots_of(make: Callable[[list[paddle.Tensor]], Any], model: paddle.Tensor) -> list[Slot]:
    """What an optimizer remembers of a parameter; found out by steps on small tensors.

    Args:
        make: Makes one of a list of parameters, with the options of one group.
        model: A parameter of the group.

    Raises:
        ConfigError: Another optimizer that gets what one remembers does not go on as this one would.
    """
    with undisturbed():
        shop = PaddleWorkshop(make, model)
        shapes = [(CUT_ELEMENTS + 3,)]
        tensors = shop.tensors(shapes, 0)
        one = shop.make(tensors)
        for number in range(1, _TRIAL_STEPS):
            shop.step(one, shop.tensors(shapes, number))
        others = [shop.clone(tensor) for tensor in tensors]
        other = shop.make(others)
        held = _held_of(one)
        if held:
            make_state(other, _parameter_of(other))
        given = _held_of(other)
        goes_on = held.keys() == given.keys()
        if goes_on:
            for key, value in given.items():
                paddle.assign(held[key], value)
            for number in range(_TRIAL_STEPS, 2 * _TRIAL_STEPS):
                for optimizer in (one, other):
                    shop.step(optimizer, shop.tensors(shapes, number))
            goes_on = all(map(shop.same, tensors, others)) and held.keys() == _held_of(one).keys()
        if not goes_on:
            raise no_journal(f"{type(one).__name__}, which remembers more than its state")
    return [
        Slot(
            key,
            dtype_name(value.dtype),
            int(value.element_size()),
            None if tuple(value.shape) == shapes[0] else tuple(value.shape),
        )
        for key, value in held.items()
    ]


def _held_of(optimizer: Any) -> dict[Key, paddle.Tensor]:
    return remembered(optimizer, _parameter_of(optimizer).name)


def _parameter_of(optimizer: Any) -> paddle.Tensor:
    (group,) = internals.groups_of(optimizer)
    (parameter,) = group["params"]
    return parameter
