"""The stand-in in `.grad` of a parameter whose gradient is scattered: each rank has a part of it.

It is a tensor without elements. Every computation with it raises, on every rank: torch's clip_grad_norm_, an
optimizer that is not sharded, numpy, a backward that would add to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from paceline.sharding import scattered_gradients
from paceline.sharding.scattered_gradients import NO_BACKWARD

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default  # what a GradScaler calls


class ScatteredGradient(torch.Tensor):
    """The value of `.grad`: it has the shape of the gradient, and no elements.

    Attributes:
        of: The scattered gradients that it belongs to.
        name_of: The parameter's name.
        number: The parameter's index.
        of_backward: The number of the backward that has set it.
    """

    of: Scattered
    name_of: str
    number: int
    of_backward: int

    @staticmethod
    def __new__(cls, name: str, index: int, like: torch.Tensor) -> ScatteredGradient:
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.name_of, made.number, made.of_backward = name, index, NO_BACKWARD
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> None:
        if func is _UNSCALE:
            return unscale(*args)
        _refuse(func, (*args, *(kwargs or {}).values()))

    def numpy(self, **_options: Any) -> NoReturn:
        _refuse(torch.Tensor.numpy, (self,))

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"<the gradient of '{self.name_of}', of which this rank has its own part>"


Scattered: TypeAlias = scattered_gradients.Scattered[torch.Tensor]


def unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """The work of a GradScaler on gradients: divide them by the scale, and report whether one is not finite.

    Each rank divides the parts that it owns. It reports non-finite gradients of all ranks, which the backward
    has found, so that all ranks skip the same steps.
    """
    whole: list[torch.Tensor] = []
    by_model: dict[int, list[ScatteredGradient]] = {}
    for gradient in gradients:
        if isinstance(gradient, ScatteredGradient):
            gradient.of.check_present(gradient.number)
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
    raise gradient.of.cannot_use(
        gradient.number,
        f"a call of torch's {func.__name__}",
        "torch.nn.utils.clip_grad_norm_, zero_grad(set_to_none=False), an optimizer that is not "
        "sharded, or a second backward without zero_grad() (accumulate within ddp.no_sync())"
        if gradient.of.of_backward
        else "a parameter that gets a second gradient in the same backward (reentrant checkpointing: "
        "use_reentrant=False, or static_graph=True); or a hook that reads it there after it was handed over; "
        "or an earlier backward has raised, and there was no zero_grad()",
    )
