"""Whose gradients on a device are not finite, without waiting for the device in each pass.

The one idea: the host learns it only when the device has computed it. So the answers of a pass are copied to
the host's memory behind it, and read at the end of a later pass, when they have long been there. Who has to
know at once (nonfinite="raise") waits: once for all gradients, and not once for each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

_MOST_UNDER_WAY = 4
"""Passes whose answers may be outstanding. A host that is further ahead of the device waits."""


class Copy(Protocol):
    """Booleans on their way to the host."""

    def is_done(self) -> bool:
        """Whether they have come. Does not wait."""
        ...

    def read(self) -> list[bool]:
        """Them, once they have come."""
        ...


class HostCopy:
    """A `Copy` behind all that the current stream has to do."""

    def __init__(self, flags: torch.Tensor) -> None:
        self._flags = flags
        self._host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        self._host.copy_(flags, non_blocking=True)
        self._event = torch.Event(flags.device)
        self._event.record()

    def is_done(self) -> bool:
        return bool(self._event.query())

    def read(self) -> list[bool]:
        self._event.synchronize()
        return list(self._host.tolist())


class FiniteChecks:
    """Looks at one rank's gradients on devices.

    Args:
        waits: Tell of each pass at its end, which waits for the device. Else that is so in the first pass
            only, and later ones are told of a pass or more later.
        copy: Makes a `Copy`.
    """

    def __init__(self, *, waits: bool, copy: Callable[[torch.Tensor], Copy] = HostCopy) -> None:
        self.waits = waits
        self._copy = copy
        self._noted: dict[torch.device, list[tuple[list[int], torch.Tensor]]] = {}
        self._under_way: deque[tuple[list[int], Copy]] = deque()
        self._is_first = True

    @property
    def is_late(self) -> bool:
        """Whether what is taken now is of earlier passes."""
        return not (self.waits or self._is_first)

    def look(self, pieces: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Begin to look at gradients of one device and dtype: (parameter index, its elements)."""
        held = [(param, piece) for param, piece in pieces if piece.numel()]
        if not held:
            return
        # An infinity norm is exact, and one call computes all. A NaN makes it a NaN.
        norms = torch._foreach_norm([piece for _, piece in held], math.inf)
        flags = torch.isfinite(torch.stack(norms))
        self._noted.setdefault(flags.device, []).append(([param for param, _ in held], flags))

    def take(self) -> list[int]:
        """Parameters of which some gradient was not finite, since last asked, as far as that is told."""
        noted, self._noted = self._noted, {}
        found: set[int] = set()
        for rows in noted.values():
            params = [param for row, _ in rows for param in row]
            flags = torch.cat([each for _, each in rows])
            if self.is_late:
                self._under_way.append((params, self._copy(flags)))
            else:
                found.update(_not_finite(params, flags.tolist()))
        while self._under_way:
            params, copy = self._under_way[0]
            if not copy.is_done() and len(self._under_way) <= _MOST_UNDER_WAY:
                break
            self._under_way.popleft()
            found.update(_not_finite(params, copy.read()))
        self._is_first = False
        return sorted(found)


def _not_finite(params: Sequence[int], are_finite: Sequence[bool]) -> list[int]:
    return [param for param, is_finite in zip(params, are_finite, strict=True) if not is_finite]
