"""Records which shards of a step on shared memory are written.

The ranks of a host write to that memory whether they make a step, and which shards are written. The memory
outlives the ranks. When a rank is lost in the middle of a step, the others find there whether the step is
whole, not made, or partial.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import DeadlineError
from paceline.sharding.shared_parameters import SharedStorage

_LONGEST_PART_S = 30.0
"""How long a rank waits, after another one is lost, for ranks that are still writing."""
_LOOK_S = 0.0005


Complete = Callable[[int, Callable[[], set[int]], float], bool]
"""Writes the shard of a rank that is lost. Arguments: the rank, a function that returns the ranks that write
nothing more, and until when to wait for another rank that writes the shard. Returns whether it is written."""


class StepTables:
    """The step tables of an optimizer's parameters that the ranks of this host share."""

    def __init__(self, storages: Callable[[], Sequence[SharedStorage[Any]]]) -> None:
        self._storages = storages

    def begin(self) -> bool:
        """Record that this rank has passed the barrier and is about to write; False: it must not write.

        It is False if another rank did not pass the barrier, and has reported that nothing was written.
        """
        # The decision in the first table holds for all of them.
        return all(storage.step_table.decide(True) for storage in self._storages())

    def refuse(self) -> bool:
        """Record that this rank did not pass the barrier; True: a rank that passed it has begun to write.

        If so, all ranks reached the barrier for the same call, and this rank writes its shard too.
        """
        return any(storage.step_table.decide(False) for storage in self._storages()[:1])

    def end_part(self) -> None:
        for storage in self._storages():
            storage.step_table.finish(storage.rank)

    def give_up(self, text: str) -> None:
        """Record that this rank has raised and writes no more of its shard; no rank needs to wait for it."""
        for storage in self._storages():
            storage.step_table.give_up()
            storage.core.abort(text)

    def settle(self, error: BaseException, complete: Complete | None) -> bool:
        """After an error, wait until no rank writes any more. Returns whether the whole step is written."""
        until = time.monotonic() + (0 if isinstance(error, DeadlineError) else _LONGEST_PART_S)
        for storage in self._storages():
            if not storage.step_table.is_finished(storage.rank):
                return False
            tried: set[int] = set()
            while True:
                gone = _gone(storage)  # first, because a rank that is gone writes nothing after this
                missing = _missing(storage)
                if not missing:
                    break
                lost = [rank for rank in missing if rank in gone and rank not in tried]
                if complete is not None and lost:
                    tried.add(lost[0])
                    if not complete(lost[0], functools.partial(_gone, storage), until):
                        complete = None  # no rank can complete it, but some may still be writing
                elif set(missing) <= gone or time.monotonic() > until:
                    return False
                time.sleep(_LOOK_S)
        return True


def _missing(storage: SharedStorage[Any]) -> list[int]:
    """The ranks of this host whose shards of this step are not written; another rank may be at the next
    step.
    """
    return [rank for rank in range(storage.world_size) if not storage.step_table.is_finished(rank)]


def _gone(storage: SharedStorage[Any]) -> set[int]:
    dead = {each["rank"] for each in storage.core.records() if each["state"] in ("dead", "left")}
    return dead | {rank for rank in range(storage.world_size) if storage.step_table.has_given_up(rank)}
