"""A rank that leaves while others wait for it says so, too, and not only those who wait.

It made an iteration less than they did. Nothing else tells of an iteration that a rank skipped as a whole:
what it does afterwards is what all do. Imports `rendezvous.lifetime`, `errors` and the
standard library.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Protocol

from paceline.errors import format_ranks
from paceline.rendezvous import lifetime


class Leaver(Protocol):
    """The passes of one wrapped model."""

    def waiting_ranks(self) -> list[int]:
        """Ranks that wait at the end of a pass that this rank has not ended."""
        ...

    @property
    def who(self) -> str:
        """As "rank 1 of 2"."""
        ...


_leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
_is_installed = False


def watch(passes: Leaver) -> None:
    """Look at the end of this process whether others wait in a pass of this model."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        lifetime.before_leaving(_look)
    _leavers.add(passes)


def _look() -> None:
    for passes in list(_leavers):
        waiting = passes.waiting_ranks()
        if waiting:
            warnings.warn(farewell(passes.who, waiting), RuntimeWarning, stacklevel=2)


def farewell(who: str, waiting: list[int]) -> str:
    """What a rank says that leaves too early."""
    return (
        f"{who.capitalize()} leaves while {format_ranks(waiting)} "
        f"{'waits' if len(waiting) == 1 else 'wait'} for it at the end of another backward.\n"
        "  likely   this rank skipped an iteration, or had fewer batches; or it leaves too early\n"
        "  hint     the steps of the ranks belong to different iterations since then: make every decision to "
        "skip on all ranks alike, or use ddp.iterate(loader) or ddp.finish()"
    )
