"""Which parts of a step on shared memory are written.

The ranks of a host note in that memory whether they make a step, and which parts are written; this outlives
them. A rank that loses another one in the middle finds there whether the step is whole, not made, or partial.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import DeadlineError
from paceline.sharding.shared_parameters import SharedStorage

_LONGEST_PART_S = 30.0
"""How long a rank that has lost another one waits for those that are still writing."""
_LOOK_S = 0.0005


Complete = Callable[[int, Callable[[], set[int]], float], bool]
"""Makes the part of a rank that is lost: the rank, who is lost as of now, and until when to wait for another
rank that does. Returns whether it is made."""


class StepTables:
    """The step tables of an optimizer's parameters that the ranks of this host share."""

    def __init__(self, storages: Callable[[], Sequence[SharedStorage[Any]]]) -> None:
        self._storages = storages

    def begin(self) -> bool:
        """Say that this rank has met all others and is about to write; False: it must not.

        Then another rank could not meet all, and has reported that nothing was written.
        """
        # The first decides, and the others follow.
        return all(storage.step_table.decide(True) for storage in self._storages())

    def refuse(self) -> bool:
        """Say that this rank could not meet all others; True: one that could has begun to write.

        Then all ranks have come to the barrier with the same, and this one makes its part.
        """
        return any(storage.step_table.decide(False) for storage in self._storages()[:1])

    def end_part(self) -> None:
        for storage in self._storages():
            storage.step_table.finish(storage.rank)

    def give_up(self, text: str) -> None:
        """This rank has raised, and will not write the rest of its part; the others need not wait for it."""
        for storage in self._storages():
            storage.step_table.give_up()
            storage.core.abort(text)

    def settle(self, error: BaseException, complete: Complete | None) -> bool:
        """When a rank is lost: wait until no rank writes any more. Returns whether all of the step is
        made.
        """
        until = time.monotonic() + (0 if isinstance(error, DeadlineError) else _LONGEST_PART_S)
        for storage in self._storages():
            if not storage.step_table.is_finished(storage.rank):
                return False
            tried: set[int] = set()
            while True:
                gone = _gone(storage)  # before the next look: who is gone has written all that it will
                missing = _missing(storage)
                if not missing:
                    break
                lost = [rank for rank in missing if rank in gone and rank not in tried]
                if complete is not None and lost:
                    tried.add(lost[0])
                    if not complete(lost[0], functools.partial(_gone, storage), until):
                        complete = None  # nobody can; but some may still be writing
                elif set(missing) <= gone or time.monotonic() > until:
                    return False
                time.sleep(_LOOK_S)
        return True


def _missing(storage: SharedStorage[Any]) -> list[int]:
    """Another rank may be at the next step."""
    return [rank for rank in range(storage.world_size) if not storage.step_table.is_finished(rank)]


def _gone(storage: SharedStorage[Any]) -> set[int]:
    dead = {each["rank"] for each in storage.core.records() if each["state"] in ("dead", "left")}
    return dead | {rank for rank in range(storage.world_size) if storage.step_table.has_given_up(rank)}
