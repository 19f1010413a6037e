"""Parameters that several wrapped models of this process share.

Each model averages the gradient, so none may change it, or read it in place, before the last one has its
copy. Such gradients are therefore copied to and from the gradient buffer. If one backward runs through
several such models, each hands over all its gradients before the first one writes its means.

Weights of micro-batches apply to a gradient as a whole. So models that contribute to one gradient must have
the same weight, and no weighted micro-batches whose running mean each of them would scale.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.errors import ConfigError
from paceline.reducer.backward_errors import shorten

if TYPE_CHECKING:
    from paceline.reducer.backward.backward_sync import BackwardSync

    Holder: TypeAlias = BackwardSync[Any]


class _Registry:
    def __init__(self) -> None:
        self.version = 0
        # In the order in which they were wrapped, which is the same on all ranks.
        self._holders: weakref.WeakKeyDictionary[Holder, None] = weakref.WeakKeyDictionary()

    def _all(self) -> list[Holder]:
        """A copy, because garbage collection may remove a holder at any time."""
        return [holder for find in self._holders.keyrefs() if (holder := find()) is not None]

    def join(self, holder: Holder) -> None:
        others = self._all()
        self._holders[holder] = None
        self.version += 1
        for other in others:
            other.refresh_sharing()

    def leave(self, holder: Holder) -> None:
        """Remove a holder. The others react at their next forward, since a backward may be under way."""
        self._holders.pop(holder, None)
        self.version += 1

    def complete_all(self, backward: int) -> None:
        within = [holder for holder in self._all() if holder.complete(backward)]
        for holder in within:
            for other in self._all():
                if other is not holder and (reason := _why_unweighed(holder, other, other in within)):
                    holder.micro_batches.refuse(reason)

    def begin_replica_group(self, holder: Holder, member: str) -> None:
        """Note that replicas of other ranks differ from the holder's on purpose from now on."""
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
        """The largest `timeout_s` that a user gave to the wrapper of any of these parameters; None: no
        wrapper of theirs was given one.
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


def _why_unweighed(holder: Holder, other: Holder, is_within: bool) -> ConfigError | None:
    """Why gradients of the holder that the other model contributes to are not weighed.

    Called at the end of a backward.

    Args:
        holder: The model whose backward ends.
        other: Any other model.
        is_within: Whether the backward runs through `other`, too.
    """
    weights, others = holder.micro_batches, other.micro_batches
    if not (weights.is_used or others.is_used):
        return None
    here, there = holder.state.rank_weight, other.state.rank_weight
    if is_within and not math.isclose(here, there):
        seen = f"weights {here:g} and {there:g} in one backward on this rank"
    elif others.count or (weights.count and is_within):
        seen = "micro-batches with weights in no_sync()"
    elif weights.is_open and other.state.accumulated and not is_within:
        seen = "micro-batches without weights in no_sync(), of the other model"
    else:
        return None
    left = set(range(len(other.trainable))) if is_within else other.state.accumulated
    known = {id(other.trainable[index]) for index in left}
    names = [name for name, p in zip(holder.names, holder.trainable, strict=True) if id(p) in known]
    return shared_weights_error(names, seen) if names else None


def shared_weights_error(names: Sequence[str], seen: str) -> ConfigError:
    return ConfigError(
        "Weights cannot apply to gradients that another wrapped model brings parts of, too.",
        seen=f"{shorten(names)}: {seen}",
        expected="the same weight for all models of one backward, and no weighted micro-batches in no_sync()",
        likely="two models with one encoder, of which one has weight= or weight(); or an earlier wrapper of "
        "the model that is still in use",
        hint="give both models the same weights; for micro-batches, wrap one module that holds both models",
    )


registry = _Registry()
