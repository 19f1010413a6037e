"""Mean gradients that are scattered: each rank has the part that it owns.

A step or a norm computed from a part would silently differ between ranks. So each parameter has a *stand-in*
in place of its gradient, which raises on every rank that uses it. `ShardedOptimizer` asks the stand-in for
this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Generic

from paceline.errors import ConfigError
from paceline.reducer.backward_errors import shorten
from paceline.reducer.communicator import Reduction
from paceline.reducer.framework_ops import FrameworkOps, Names, Tensor, numel

NO_BACKWARD = -1
"""The backward number of a stand-in that no backward has put in place yet."""


class Scattered(Generic[Tensor]):
    """This rank's parts of the mean gradients of one model, after a backward that scatters.

    Attributes:
        of_backward: The number of the last backward whose means are here; 0: there are no valid means.
        rank: This rank.
        stand_ins: The stand-in of each gradient.
    """

    def __init__(
        self,
        names: Sequence[str],
        ops: FrameworkOps[Tensor],
        parameters: Sequence[Tensor],
        reduction: Reduction[Tensor],
        rank: int,
    ) -> None:
        self.of_backward = 0
        self.rank = rank
        self._factors: dict[int, float] = {}  # by which the means were multiplied since the backward
        self._names, self._ops, self._reducer = names, ops, reduction.reducer
        self._parameters, self._places = parameters, reduction.places
        self.stand_ins = [
            ops.stand_in(name, index, parameter)
            for index, (name, parameter) in enumerate(zip(names, parameters))
        ]
        for stand_in in self.stand_ins:
            stand_in.of = self
        self._backwards = 0
        itemsizes = [int(place.element_size()) for place in reduction.places]
        self._own = [
            [(each.begin // itemsize, each.end // itemsize) for each in its if each.rank == rank]
            for its, itemsize in zip(reduction.owned, itemsizes, strict=True)
        ]
        self._parts = {
            (index, begin, end): self._cut(index, begin, end)
            for index, its in enumerate(self._own)
            for begin, end in its
        }
        self._here: list[int] = []

    def _cut(self, index: int, begin: int, end: int) -> Tensor:
        place = self._places[index]
        part: Tensor = place if end - begin == numel(place) else self._ops.flat(place)[begin:end]
        return part

    def _found(self, index: int) -> object | None:
        found: object | None = self._ops.gradient(self._parameters[index])
        return found

    def name(self, index: int) -> str:
        return self._names[index]

    def find_nonfinite(self) -> set[int]:
        """Parameters whose gradient, or mean, was not finite in the last backward."""
        result = self._reducer.last
        return set() if result is None else {*(index for _, index in result.nonfinite), *result.overflowed}

    def forget(self) -> None:
        self.of_backward = 0

    def put(self, indices: Iterable[int]) -> None:
        """Put the stand-ins of these parameters in place, after a backward has computed their means."""
        self._backwards += 1
        self.of_backward = self._backwards
        self._factors.clear()
        self._here = list(indices)
        for index in self._here:
            self.stand_ins[index].of_backward = self.of_backward
            self._ops.put_stand_in(self._parameters[index], self.stand_ins[index])

    def give_up(self) -> None:
        self.of_backward = 0
        for index in range(len(self._names)):
            if self._found(index) is not None:
                self._ops.put_stand_in(self._parameters[index], self.stand_ins[index])

    def move_from(self, before: Scattered[Tensor]) -> None:
        """Take over the means and stand-ins of another plan, if it has the same parts."""
        if before._own != self._own or not before.of_backward:
            before.of_backward = 0
            return
        for key, part in self._parts.items():
            self._ops.copy(before._parts[key], part)
        here = [i for i in before._here if self._found(i) is before.stand_ins[i]]
        self.put(here)
        self._factors.update(before._factors)
        before.of_backward = 0

    def check_present(self, index: int) -> None:
        """Raise if the means of this stand-in are no longer valid."""
        if self.stand_ins[index].of_backward == self.of_backward:
            return
        raise ConfigError(
            f"The gradient of '{self._names[index]}' is not there any more.",
            seen='reduce="scatter": it is that of an earlier backward, or of one that has raised',
            hint=f"{self._ops.names.clearing} before each backward, and a step only after a backward "
            "that has not raised",
        )

    def cannot_use(self, index: int, seen: str, likely: str) -> ConfigError:
        names = self._ops.names
        return ConfigError(
            f"The gradient of '{self._names[index]}' cannot be used: this rank has a part of it.",
            seen=f'reduce="scatter", and {seen}',
            expected=f"ShardedOptimizer.step(), which uses each rank's part; {names.clearing} before the "
            f"next backward; {names.variable}.clip_grad_norm_(), {names.variable}.grad_norm() and "
            f"{names.variable}.nonfinite(), which know all parts",
            likely=likely,
            hint='wrap with reduce="mean" where a script needs whole gradients',
            parameter=self._names[index],
        )

    def part(self, index: int, begin: int, end: int) -> Tensor:
        """The mean of these elements of a parameter, in memory order.

        If this rank owns the whole parameter and all of it is asked for, the result has the parameter's
        shape.
        """
        part = self._parts.get((index, begin, end))
        if part is None:
            is_own = any(first <= begin and end <= last for first, last in self._own[index])
            if not is_own and begin < end:
                raise self._not_owned(index)
            part = self._parts[index, begin, end] = self._cut(index, begin, end)
        return part

    def _not_owned(self, index: int) -> ConfigError:
        return ConfigError(
            f"The gradient of '{self._names[index]}' was brought to the ranks of another optimizer.",
            seen='reduce="scatter", and two optimizers with the same parameters: the last one counts',
            hint="make one ShardedOptimizer for each parameter, and drop it before the next one is made",
        )

    def own_parts(self, index: int) -> list[Tensor]:
        return [self._parts[index, begin, end] for begin, end in self._own[index]]

    # --- the norm ---

    def check_complete(self, doing: str) -> None:
        """Raise unless all gradients are those of the last backward."""
        for index in range(len(self._names)):
            found = self._found(index)
            if found is None and index not in self._here:
                continue
            if found is not self.stand_ins[index]:
                raise ConfigError(
                    f"{doing}: the gradient of '{self._names[index]}' was changed since backward.",
                    seen='reduce="scatter": each rank has a part of each gradient',
                    expected="the gradients of the last backward, all of them",
                    got="None" if found is None else "another tensor in .grad",
                    hint='clip first; or wrap with reduce="mean", which gives every rank whole gradients',
                )
            self.check_present(index)

    def note_factor(self, indices: Iterable[int], factor: float) -> None:
        for index in indices:
            self._factors[index] = self._factors.get(index, 1.0) * factor

    def clip(self, max_norm: float, norm_type: float, squared_norm: float) -> float:
        """Scale all means so that their norm is at most `max_norm`.

        Raises:
            ConfigError: It is another norm than the 2-norm, or gradients are not those of the last backward.
        """
        if norm_type != 2.0:
            raise _only_two_norm(norm_type)
        self.check_complete("clip_grad_norm_")
        factors = {self._factors.get(index, 1.0) for index in self._here} or {1.0}
        if len(factors) > 1:
            raise ConfigError(
                "clip_grad_norm_: some gradients were divided by a GradScaler's scale and others not.",
                seen=f'reduce="scatter"; factors since backward: {sorted(factors)}',
                hint="scaler.unscale_() for all optimizers of the model before, or for none",
            )
        norm = math.sqrt(squared_norm) * abs(factors.pop())
        factor = max_norm / (norm + 1e-6)  # as frameworks do: a NaN stays one, a small norm changes nothing
        if not factor >= 1.0:
            parts = [part for index in self._here for part in self.own_parts(index)]
            if parts:
                self._ops.scale(parts, factor)
            self.note_factor(self._here, factor)
        return norm


def _only_two_norm(norm_type: float) -> ConfigError:
    return ConfigError(
        'clip_grad_norm_: with reduce="scatter" there is the 2-norm.',
        expected="norm_type=2.0, which the ranks have found in backward",
        got=f"norm_type={norm_type}",
        hint='reduce="mean" gives every rank whole gradients, for any norm',
        argument="norm_type",
    )


def scatter(
    names: Sequence[str],
    ops: FrameworkOps[Tensor],
    parameters: Sequence[Tensor],
    reduction: Reduction[Tensor],
    rank: int,
    before: Scattered[Tensor] | None,
) -> Scattered[Tensor] | None:
    """The scattered means of a reduction; None if it does not scatter."""
    if not reduction.owned:
        return None
    means = Scattered(names, ops, parameters, reduction, rank)
    if before is not None:
        means.move_from(before)
    return means


def left_over(name: str, where: str, words: Names) -> ConfigError:
    return ConfigError(
        f"{words.wrapper} cannot average the gradient of '{name}' once more.",
        where=where,
        seen='reduce="scatter": .grad stands for the mean of an earlier backward, of which a rank has a part',
        hint=f"{words.clearing} before each backward; accumulate within {words.variable}.no_sync()",
    )


def refuse_sparse(words: Names, names: Sequence[str]) -> None:
    """Raise if parameters have sparse gradients, which cannot be scattered."""
    if names:
        raise ConfigError(
            f'{words.wrapper}: reduce="scatter" is for dense gradients.',
            got=f"sparse gradients of {shorten(names)}",
            hint='nn.Embedding(..., sparse=False); or reduce="mean"',
            argument="reduce",
        )
