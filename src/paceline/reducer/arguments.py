"""Arguments that both front ends' wrappers have, checked alike.

The one idea: an argument is honoured, or refused with a sentence; none is silently ignored. Imports `errors`
and `arguments`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from paceline.arguments import Arguments
from paceline.reducer.buffer_policy import check_policies
from paceline.reducer.micro_batches import as_weight

MIB = 1 << 20
NONFINITE_POLICIES = ("warn", "raise", "ignore")
REDUCE_THROUGH = ("auto", "memory", "group")


class WrapperArguments:
    """The arguments of a wrapper's constructor. Each method returns the value as Paceline goes on with it.

    Args:
        owner: The class whose constructor got them.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.check = Arguments(owner)

    def mebibytes(self, name: str, value: float) -> int:
        """The size of a bucket, in bytes."""
        size = self.check.number(name, value, above=0, what="a number of MiB", hint=f"for example {name}=25")
        return max(1, int(size * MIB))

    def nonfinite(self, value: str) -> str:
        """What to do about infinities."""
        return self.check.choice("nonfinite", value, NONFINITE_POLICIES)

    def reduce_through(self, value: str) -> str:
        """Where gradients are averaged."""
        return self.check.choice("reduce_through", value, REDUCE_THROUGH)

    def optional_flag(self, name: str, value: bool | None) -> bool | None:
        """A flag; None stays None."""
        return None if value is None else self.check.flag(name, value)

    def one_buffer_switch(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
    ) -> tuple[bool | None, bool | None]:
        """Both, the first as it counts; a warning, as torch's, where both are given."""
        broadcast_buffers = self.optional_flag("broadcast_buffers", broadcast_buffers)
        forward_sync_buffers = self.optional_flag("forward_sync_buffers", forward_sync_buffers)
        if forward_sync_buffers is None or broadcast_buffers is None:
            return broadcast_buffers, forward_sync_buffers
        warnings.warn(
            f"{self._owner}: broadcast_buffers is ignored where forward_sync_buffers is given.",
            FutureWarning,  # torch's
            stacklevel=4,
        )
        return None, forward_sync_buffers

    def passes(self, name: str, value: int | None) -> int | None:
        """A number of passes; 0 is none at all."""
        hint = f"{name}=100; 0 for never; None where there is a reason"
        return None if value is None else self.check.whole(name, value, least=0, hint=hint)

    def weight(self, value: float | Callable[..., Any] | None) -> float | Callable[..., Any] | None:
        """A number, or a function of forward's arguments."""
        return value if value is None or callable(value) else as_weight(value, self._owner)

    def buffers(self, value: Mapping[str, str] | None) -> dict[str, str]:
        """What is done with buffers, by name pattern."""
        return check_policies(value, self._owner)
