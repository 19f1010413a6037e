"""batched_grad_copy: gradients that reach their places in the arena a bucket at a time.

On a GPU each copy is a launch of a kernel, and a model of many small parameters spends its backward on them.
So their hooks only note what is to be copied, and one call copies all of it before a bucket is reduced.
"""

from __future__ import annotations

import torch


class BatchedCopies:
    """What waits to be copied into one arena."""

    def __init__(self) -> None:
        self._places: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def add(self, place: torch.Tensor, gradient: torch.Tensor) -> None:
        """Copy `gradient` to `place`, later; it must not change until then."""
        self._places.append(place)
        self._gradients.append(gradient)

    def make(self) -> None:
        """Copy all that waits."""
        if self._places:
            with torch.no_grad():
                torch._foreach_copy_(self._places, self._gradients)
            self._places.clear()
            self._gradients.clear()
