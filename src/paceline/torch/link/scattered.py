"""Mean gradients of which each rank has the part that it owns, and what stands in `.grad` for them.

The one idea: a gradient that is there in part must not be taken for a whole one. A norm of it, or a step
with it, would differ from rank to rank, and nobody would see. So `.grad` is a tensor without elements, and
whatever computes with it raises on every rank: torch's clip_grad_norm_, an optimizer that is not sharded,
numpy, a backward that would add to it. `ShardedOptimizer` asks it for the part that is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from paceline.errors import ConfigError
from paceline.reducer.owners import Ranges

_NO_PASS = -1
_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default  # what a GradScaler calls


class ScatteredGradient(torch.Tensor):
    """Stands in `.grad`: it has the shape of the gradient, and no elements.

    Attributes:
        of: The gradients that it is one of.
        number: Which parameter's it is.
        of_pass: The pass that has put it there.
    """

    of: Scattered
    number: int
    of_pass: int

    @staticmethod
    def __new__(cls, of: Scattered, index: int, like: torch.Tensor) -> ScatteredGradient:
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.of, made.number, made.of_pass = of, index, _NO_PASS
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        if func is _UNSCALE:
            return unscale(*args)
        _refuse(func, (*args, *(kwargs or {}).values()))

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"<the gradient of '{self.of.name(self.number)}', of which this rank has its own part>"

    def check(self) -> None:
        """Raise if it is not of the last pass.

        Raises:
            ConfigError: What it stands for is not there any more.
        """
        if self.of_pass == self.of.of_pass:
            return
        raise ConfigError(
            f"The gradient of '{self.of.name(self.number)}' is not there any more.",
            seen='reduce="scatter": it is that of an earlier backward, or of one that has raised',
            hint="optimizer.zero_grad() before each backward, and a step only after a backward that has not "
            "raised",
        )


class Scattered:
    """The means of one model, as a pass that scatters leaves them on this rank.

    Args:
        names: The parameters' names.
        parameters: Those that the plan lists.
        places: Where the mean of each lies, where this rank owns it.
        ranges: Who owns what of each.
        rank: This rank.
        find_nonfinite: Parameters of the last pass that had a gradient, or a mean, that was not finite.

    Attributes:
        of_pass: The number of the last pass that has left its means here; 0: they are of no use now.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
        ranges: Sequence[Ranges],
        rank: int,
        find_nonfinite: Callable[[], set[int]],
    ) -> None:
        self.of_pass = 0
        self.find_nonfinite = find_nonfinite
        self._factors: dict[int, float] = {}  # with which means have been multiplied since the pass
        self._names, self._parameters, self._places = names, parameters, places
        self._passes = 0
        self._stand_ins = [ScatteredGradient(self, index, p) for index, p in enumerate(parameters)]
        self._own = [
            [(each.begin // place.itemsize, each.end // place.itemsize) for each in its if each.rank == rank]
            for its, place in zip(ranges, places, strict=True)
        ]
        self._parts = {
            (index, begin, end): self._part(index, begin, end)
            for index, its in enumerate(self._own)
            for begin, end in its
        }
        self._here: list[int] = []

    def name(self, index: int) -> str:
        """The parameter's."""
        return self._names[index]

    def stand_in(self, index: int) -> ScatteredGradient:
        """What stands in `.grad` of a parameter."""
        return self._stand_ins[index]

    def forget(self) -> None:
        """A pass begins, which will overwrite the means."""
        self.of_pass = 0

    def put(self, indices: Iterable[int]) -> None:
        """A pass has made the means of these parameters: let them stand in `.grad`."""
        self._passes += 1
        self.of_pass = self._passes
        self._factors.clear()
        self._here = list(indices)
        for index in self._here:
            stand_in = self._stand_ins[index]
            stand_in.of_pass = self.of_pass
            self._parameters[index].grad = stand_in

    def give_up(self) -> None:
        """A pass has raised: what gradients are now, is of no use to anybody."""
        self.of_pass = 0
        for parameter, stand_in in zip(self._parameters, self._stand_ins):
            if parameter.grad is not None:
                parameter.grad = stand_in

    def move_from(self, before: Scattered) -> None:
        """Take over the means of another plan for the same parts, and what stands for them."""
        if before._own != self._own or not before.of_pass:
            before.of_pass = 0
            return
        for key, part in self._parts.items():
            part.copy_(before._parts[key])
        here = [i for i in before._here if self._parameters[i].grad is before._stand_ins[i]]
        self.put(here)
        self._factors.update(before._factors)
        before.of_pass = 0

    def part(self, index: int, begin: int, end: int) -> torch.Tensor:
        """The mean of these elements of a parameter, in the order of its memory.

        All of them in the parameter's shape, if this rank owns all.

        Raises:
            ConfigError: It does not own them.
        """
        part = self._parts.get((index, begin, end))
        if part is None:
            is_own = any(first <= begin and end <= last for first, last in self._own[index])
            if not is_own and begin < end:
                raise self._not_owned(index)
            part = self._parts[index, begin, end] = self._part(index, begin, end)
        return part

    def _part(self, index: int, begin: int, end: int) -> torch.Tensor:
        place = self._places[index]
        if end - begin == place.numel():
            return place
        return place.as_strided((place.numel(),), (1,))[begin:end]

    def _not_owned(self, index: int) -> ConfigError:
        return ConfigError(
            f"The gradient of '{self._names[index]}' was brought to the ranks of another optimizer.",
            seen='reduce="scatter", and two optimizers with the same parameters: the last one counts',
            hint="make one ShardedOptimizer for each parameter, and drop it before the next one is made",
        )

    # --- the norm ---

    def are_in_place(self) -> bool:
        """Whether this stands in `.grad` of any parameter."""
        return any(type(parameter.grad) is ScatteredGradient for parameter in self._parameters)

    def check_complete(self, doing: str) -> None:
        """Raise unless all gradients are those that the last pass has left.

        Raises:
            ConfigError: One was left, or replaced.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None and index not in self._here:
                continue
            if parameter.grad is not self._stand_ins[index]:
                raise ConfigError(
                    f"{doing}: the gradient of '{self._names[index]}' was changed since backward.",
                    seen='reduce="scatter": each rank has a part of each gradient',
                    expected="the gradients of the last backward, all of them",
                    got="None" if parameter.grad is None else "another tensor in .grad",
                    hint='clip first; or wrap with reduce="mean", which gives every rank whole gradients',
                )
            self._stand_ins[index].check()

    def note_factor(self, indices: Iterable[int], factor: float) -> None:
        """These means have been multiplied with it, on all ranks."""
        for index in indices:
            self._factors[index] = self._factors.get(index, 1.0) * factor

    def clip(self, max_norm: float, squared_norm: float) -> float:
        """Scale all means so that their norm is at most `max_norm`.

        Args:
            squared_norm: What the pass has found.

        Returns:
            The norm before.
        """
        self.check_complete("clip_grad_norm_")
        factors = {self._factors.get(index, 1.0) for index in self._here} or {1.0}
        if len(factors) > 1:
            raise ConfigError(
                "clip_grad_norm_: some gradients were divided by a GradScaler's scale and others not.",
                seen=f'reduce="scatter"; factors since backward: {sorted(factors)}',
                hint="scaler.unscale_() for all optimizers of the model before, or for none",
            )
        norm = math.sqrt(squared_norm) * abs(factors.pop())
        factor = max_norm / (norm + 1e-6)  # as in torch: a NaN stays a NaN, and a small norm changes nothing
        if not factor >= 1.0:
            parts = [part for index in self._here for part in self.own_parts(index)]
            if parts:
                with torch.no_grad():
                    torch._foreach_mul_(parts, factor)
            self.note_factor(self._here, factor)
        return norm

    def own_parts(self, index: int) -> list[torch.Tensor]:
        """The parts of a parameter's mean that are here."""
        return [self._parts[index, begin, end] for begin, end in self._own[index]]


def only_two_norm(norm_type: float) -> ConfigError:
    """The error of a norm that the passes have not found on their way."""
    return ConfigError(
        'clip_grad_norm_: with reduce="scatter" there is the 2-norm.',
        expected="norm_type=2.0, which the ranks have found in backward",
        got=f"norm_type={norm_type}",
        hint='reduce="mean" gives every rank whole gradients, for any norm',
        argument="norm_type",
    )


def unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """What a GradScaler does to gradients: divide them by the scale, and tell whether one is not finite.

    Each rank divides what it owns, and tells of all, as the passes have found it: so all ranks skip the same
    steps.
    """
    whole: list[torch.Tensor] = []
    by_model: dict[int, list[ScatteredGradient]] = {}
    for gradient in gradients:
        if isinstance(gradient, ScatteredGradient):
            gradient.check()
            by_model.setdefault(id(gradient.of), []).append(gradient)
        else:
            whole.append(gradient)
    for group in by_model.values():
        of, indices = group[0].of, [gradient.number for gradient in group]
        if not of.find_nonfinite().isdisjoint(indices):
            found_inf.fill_(1)
        for index in indices:
            whole += of.own_parts(index)
        of.note_factor(indices, float(inverse))
    if whole:
        torch._amp_foreach_non_finite_check_and_unscale_(whole, found_inf, inverse)


def _refuse(func: Any, args: Iterable[Any]) -> NoReturn:
    flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    gradient = next(item for item in flat if isinstance(item, ScatteredGradient))
    raise ConfigError(
        f"The gradient of '{gradient.of.name(gradient.number)}' cannot be used: this rank has a part of it.",
        seen=f'reduce="scatter", and a call of torch\'s {func.__name__}',
        expected="ShardedOptimizer.step(), which uses each rank's part; optimizer.zero_grad() before the "
        "next backward; ddp.clip_grad_norm_(), ddp.grad_norm() and ddp.nonfinite(), which know all parts",
        likely="torch.nn.utils.clip_grad_norm_, zero_grad(set_to_none=False), an optimizer that is not "
        "sharded, or a second backward without zero_grad() (accumulate within ddp.no_sync())"
        if gradient.of.of_pass
        else "a parameter that gets a second gradient in the same backward (reentrant checkpointing: "
        "use_reentrant=False, or static_graph=True); or a hook that reads it there after it was handed over; "
        "or an earlier backward has raised, and there was no zero_grad()",
        hint='wrap with reduce="mean" where a script needs whole gradients',
        parameter=gradient.of.name(gradient.number),
    )
