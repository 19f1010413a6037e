"""Paceline's hooks of parameters, which hand gradients over after all hooks of the user.

torch calls hooks in the order of registration. So Paceline's hooks are registered again if others were
registered after them. Hooks of autograd's nodes, which torch's DDP uses, always come last. But they take a
third longer, are lost when the model is converted, and run on the stream on which the model was wrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline import _core


class LastHooks:
    """One hook of each parameter, from `register` to `remove`.

    `remove` finds the hooks themselves and needs no handles. So it finds all of them, even if a signal
    handler has raised within `register`.

    Attributes:
        not_last: Returns the indices of hooks after which others were registered. Not a method, because each
            step calls it twice.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], hooks: Sequence[Callable[[torch.Tensor], None]]
    ) -> None:
        self._parameters, self._hooks = list(parameters), list(hooks)
        self._tensors = [parameter._cdata for parameter in self._parameters]
        order = _core.HookOrder(self._parameters, self._hooks, "_post_accumulate_grad_hooks")
        self.not_last: Callable[[], list[int]] = order.not_last

    def register(self) -> None:
        for index in range(len(self._hooks)):
            self._register(index)

    def put_last(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._remove(index)
            self._register(index)

    def find_swapped(self) -> list[int]:
        """The parameters whose Python object has another C++ tensor now: their hooks have not been called.

        `torch.utils.swap_tensors` swaps tensors, and so do conversions and load_state_dict() if
        `torch.__future__.set_swap_module_params_on_conversion(True)` was called. The Python object keeps its
        hooks, but autograd looks for them in the C++ tensor, so this method sets them there again.
        """
        now = [parameter._cdata for parameter in self._parameters]
        found = [index for index, (before, after) in enumerate(zip(self._tensors, now)) if before != after]
        for index in found:
            parameter = self._parameters[index]
            with taking_hooks(parameter):
                parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
                parameter._backward_hooks = parameter._backward_hooks
        self._tensors = now
        return found

    def remove(self) -> None:
        for index in range(len(self._hooks)):
            self._remove(index)

    def _remove(self, index: int) -> None:
        registered, ours = self._parameters[index]._post_accumulate_grad_hooks or {}, self._hooks[index]
        for key in [key for key, hook in registered.items() if hook is ours]:
            del registered[key]

    def _register(self, index: int) -> None:
        parameter = self._parameters[index]
        with taking_hooks(parameter):
            parameter.register_post_accumulate_grad_hook(self._hooks[index])  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def taking_hooks(parameter: torch.Tensor) -> Iterator[None]:
    """Allow hooks on a frozen parameter, which torch refuses; the parameter may be trained again later."""
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            parameter.requires_grad_(False)
