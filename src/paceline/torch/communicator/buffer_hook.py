"""A user's hook that keeps buffers in step: what torch calls a buffer communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel.distributed import _BufferCommHookLocation

from paceline.arguments import Arguments


class BufferHook:
    """Calls the hook in forward, and waits at the end of backward for the futures that it returned.

    Args:
        state: Handed to the hook.
        call: The hook.
        location: Before forward, or after it (None too).
    """

    def __init__(
        self, state: object, call: Callable[..., Any], location: _BufferCommHookLocation | None
    ) -> None:
        check = Arguments("_register_buffer_comm_hook")
        check.function("hook", call, "hook(state, {name: buffer})")
        if location is not None and not isinstance(location, _BufferCommHookLocation):
            name, expected = "comm_hook_location", "torch.nn.parallel.distributed._BufferCommHookLocation"
            raise check.refuse(name, location, expected, "leave it out: after forward", is_type=True)
        self._state = state
        self._call = call
        self._is_before = location is _BufferCommHookLocation.PRE_FORWARD
        self._futures: list[torch.futures.Future[Any]] = []

    def before_forward(self, buffers: dict[str, torch.Tensor]) -> None:
        if self._is_before:
            self._run(buffers)
            self.end_backward()  # forward must see the result

    def after_forward(self, buffers: dict[str, torch.Tensor]) -> None:
        if not self._is_before:
            self._run(buffers)

    def end_backward(self) -> None:
        """Wait for what the hook has begun."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def _run(self, buffers: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self._futures += self._call(self._state, buffers) or []
