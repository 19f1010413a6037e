"""Parameters that several wrapped models of this process have in common.

Each averages the gradient, so none may change it, or read it where it lies, before the last has its copy:
such gradients are copied to and from the gradient buffer. Where one backward runs through several such
models, each hands over all that it has before the first writes its means.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from paceline.reducer.backward.backward_sync import BackwardSync

    Holder: TypeAlias = BackwardSync[Any]


class _Registry:
    def __init__(self) -> None:
        self.version = 0
        # In the order in which they were wrapped, which is the same on all ranks.
        self._holders: weakref.WeakKeyDictionary[Holder, None] = weakref.WeakKeyDictionary()

    def _all(self) -> list[Holder]:
        """A copy, because a garbage collection may end one of them at any time."""
        return [holder for find in self._holders.keyrefs() if (holder := find()) is not None]

    def join(self, holder: Holder) -> None:
        others = self._all()
        self._holders[holder] = None
        self.version += 1
        for other in others:
            other.refresh_sharing()

    def leave(self, holder: Holder) -> None:
        """One less. The others learn of it at their next forward: a backward may be under way."""
        self._holders.pop(holder, None)
        self.version += 1

    def complete_all(self, backward: int) -> None:
        for holder in self._all():
            holder.complete(backward)

    def begin_replica_group(self, holder: Holder, member: str) -> None:
        """From now on the replicas of other ranks differ from the holder's on purpose."""
        holder.member = member
        self.version += 1

    def replica_group_of(self, parameters: Sequence[object]) -> str:
        apart = [holder for holder in self._all() if holder.member]
        known = {id(parameter) for parameter in parameters} if apart else set()
        return next(
            (each.member for each in apart if not known.isdisjoint(map(id, each.trainable))),
            "",
        )

    def timeout_of(self, parameters: Iterable[object]) -> float | None:
        """The `timeout_s` that a user gave to the wrapper of any of these parameters; None: to
        none of them.
        """
        asked = {each: each.asked_timeout_s for each in self._all()}
        known = {id(parameter) for parameter in parameters} if any(asked.values()) else set()
        found = [
            timeout_s
            for each, timeout_s in asked.items()
            if timeout_s is not None and not known.isdisjoint(map(id, each.trainable))
        ]
        return max(found, default=None)

    def shared_by_others(self, holder: Holder) -> set[int]:
        held = Counter(id(p) for each in self._all() for p in each.trainable)
        return {index for index, p in enumerate(holder.trainable) if held[id(p)] > 1}


registry = _Registry()
