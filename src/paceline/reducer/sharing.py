"""Parameters that several wrapped models of this process have in common. The same for every framework.

The one idea: each of them averages the gradient, so none may change it, or read it where it lies, before the
last has its copy. Such gradients are copied to and from the arena, whatever is done with all others.

Imports only the standard library.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Holder(Protocol):
    """The passes of one wrapped model."""

    @property
    def trainable(self) -> Sequence[object]: ...

    def refresh_sharing(self) -> None:
        """Look at `shared_by_others` again."""
        ...


class _Registry:
    """All holders.

    Attributes:
        version: Another number after each change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def join(self, holder: Holder) -> None:
        """One more: the others learn of it at once."""
        others = list(self._holders)
        self._holders.add(holder)
        self.version += 1
        for other in others:
            other.refresh_sharing()

    def leave(self, holder: Holder) -> None:
        """One less. The others learn of it at their next forward: a backward may be under way."""
        self._holders.discard(holder)
        self.version += 1

    def shared_by_others(self, holder: Holder) -> set[int]:
        """Indices of the holder's parameters that others hold as well."""
        held = Counter(id(p) for each in self._holders for p in each.trainable)
        return {index for index, p in enumerate(holder.trainable) if held[id(p)] > 1}


registry = _Registry()
