"""Why a rank can't share memory, told to the others, so that all of them raise. Imports errors.

The one idea: a rank that meets a limit of its own does not raise alone; it says so in the next exchange, and
all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError, RegionError, format_ranks
from paceline.rendezvous.limits import explain


@dataclass(frozen=True)
class Obstacle:
    """Why a rank can't go on; no problem: it can.

    A limit of its own is told to all ranks, and ends the forming; whatever else keeps it from mapping
    another rank's memory makes it a host of its own.
    """

    problem: str = ""
    likely: str = ""
    remedy: str = ""
    is_limit: bool = False

    @classmethod
    def of(cls, error: PacelineError) -> Obstacle:
        return cls(f"{error.summary} {error.seen}", error.likely, error.hint, is_limit=True)

    @classmethod
    def of_system(cls, error: OSError, doing: str) -> Obstacle:
        likely, remedy = explain(error.errno or 0)
        return cls(f"could not {doing}: {error}", likely, remedy, is_limit=bool(likely))

    def facts(self) -> dict[str, Any]:
        return dict(vars(self))


def raise_limits(everybodys: Sequence[Mapping[str, Any]], what: str) -> None:
    """The error of all ranks, if one of them has met a limit.

    Args:
        everybodys: The `facts()` of all ranks.
        what: What was to be shared.
    """
    failed = [rank for rank, each in enumerate(everybodys) if each["is_limit"]]
    if failed:
        raise RegionError(
            f"{format_ranks(failed).capitalize()} could not take {what}.",
            seen="\n".join(f"rank {rank}: {everybodys[rank]['problem']}" for rank in failed),
            likely=everybodys[failed[0]]["likely"],
            hint=f"on {format_ranks(failed)}: {everybodys[failed[0]]['remedy']}",
            ranks=tuple(failed),
        )
