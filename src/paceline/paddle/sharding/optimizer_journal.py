"""What a journal asks of Paddle's optimizers: a step of one block, and what they remember.

The one idea: Paddle knows a piece by its parameter's name, and there may be several pieces of one parameter,
each in a block of its own. So each block has an optimizer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle

from paceline.paddle import internals
from paceline.paddle.sharding.elementwise import PaddleWorkshop, undisturbed
from paceline.paddle.sharding.whole_state import Key, make_state, remembered
from paceline.sharding.cuts import CUT_ELEMENTS
from paceline.sharding.journal import Part, slots_from
from paceline.sharding.journal_layout import Slot
from paceline.sharding.optimizer_arguments import no_journal

_TRIAL_STEPS = 4


class PaddlePart(Part[paddle.Tensor]):
    """See `Part`.

    Args:
        tensors: The pieces; those of one rank are parameters of their own.
        blocks: The numbers of the pieces of each block.
        optimizers: For each block one.

    Attributes:
        optimizers: Those.
    """

    def __init__(
        self,
        tensors: Sequence[paddle.Tensor],
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

    def held(self, number: int) -> dict[Any, Any]:
        return remembered(self.optimizer_of(number), self._tensors[number].name)

    def lay(self, number: int, key: Any, view: paddle.Tensor) -> None:
        internals.lay_into(self.held(number)[key], view)

    def recall(self, number: int, views: Mapping[Any, paddle.Tensor]) -> None:
        make_state(self.optimizer_of(number), self._tensors[number])
        for key, value in self.held(number).items():
            if value.size:
                internals.lay_into(value, views[key])


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
        others = [tensor.clone() for tensor in tensors]
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
    return slots_from(held, shapes[0])


def _held_of(optimizer: Any) -> dict[Key, paddle.Tensor]:
    return remembered(optimizer, _parameter_of(optimizer).name)


def _parameter_of(optimizer: Any) -> paddle.Tensor:
    (group,) = internals.groups_of(optimizer)
    (parameter,) = group["params"]
    return parameter
