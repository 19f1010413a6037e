"""Our hooks of parameters, which hand gradients over after all hooks of users.

Torch calls hooks in the order of registration, so ours are registered again where others have come after
them. Hooks of autograd's node, as torch's DDP has, come last by themselves, but take a third longer, are lost
when the model is converted, and run in the stream in which the model was wrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline import _core


class LastHooks:
    """One hook of each parameter, from `register` to `remove`.

    Hooks are found by what they are, and not by handles: a signal handler that raises in `register` leaves
    none that `remove` does not know of.

    Attributes:
        not_last: Which of them others have come after, by index. No method, because each step asks twice.
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
        """Which parameters are other tensors now, behind the same object: their hooks have not been called.

        `torch.utils.swap_tensors` does that, and with it conversions and load_state_dict() where
        `torch.__future__.set_swap_module_params_on_conversion(True)` was called. What has the hooks is the
        object, but autograd looks for them in the tensor; so they are given to that again.
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
    """Lets a frozen parameter take hooks, which torch refuses; it may be trained again."""
    is_frozen = not parameter.requires_grad
    if is_frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            parameter.requires_grad_(False)
