"""Hooks of parameters whose registration a signal handler has interrupted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch.backward.last_hooks import LastHooks


class Struck(nn.Parameter):
    """A signal comes when it has its first hook, and no one has the handle yet."""

    is_struck = False

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        handle = super().register_post_accumulate_grad_hook(hook)
        if not Struck.is_struck:
            Struck.is_struck = True
            raise KeyboardInterrupt
        return handle


def test_hooks_that_were_registered_in_part_are_removed() -> None:
    parameters = [nn.Parameter(torch.ones(1)), Struck(torch.ones(1)), nn.Parameter(torch.ones(1))]
    called: list[int] = []
    users: list[int] = []
    torch.Tensor.register_post_accumulate_grad_hook(parameters[1], lambda _: users.append(1))

    def hooks() -> list[Any]:
        return [lambda _, index=index: called.append(index) for index in range(3)]

    ours = LastHooks(parameters, hooks())
    with pytest.raises(KeyboardInterrupt):
        ours.register()
    ours.remove()
    LastHooks(parameters, hooks()).register()
    torch.stack(list(parameters)).sum().backward()
    assert sorted(called) == [0, 1, 2] and users == [1]
