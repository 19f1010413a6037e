"""Why a rank cannot share memory: it is reported in the next exchange, and all ranks raise the same error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import PacelineError, RegionError, format_ranks
from paceline.rendezvous.resource_limits import explain

_SANDBOX = (
    "that rank has died, or a sandbox, a seccomp filter or another user namespace keeps processes of this "
    "machine from passing descriptors to each other over Unix sockets"
)
_ALLOW = 'let them do so (SCM_RIGHTS); or reduce_through="group", which needs no shared memory'


@dataclass(frozen=True)
class SharedMemoryFailure:
    """Why a rank cannot share memory; an empty `problem` means that it can.

    Attributes:
        owner: The rank whose memory this one did not get; -1 if the problem concerns no other rank.
    """

    problem: str = ""
    likely: str = ""
    remedy: str = ""
    is_limit: bool = False
    owner: int = -1

    @classmethod
    def of(cls, error: PacelineError) -> SharedMemoryFailure:
        return cls(f"{error.summary} {error.seen}", error.likely, error.hint, is_limit=True)

    @classmethod
    def of_system(cls, error: OSError, doing: str) -> SharedMemoryFailure:
        likely, remedy = explain(error.errno or 0)
        return cls(f"could not {doing}: {error}", likely, remedy, is_limit=bool(likely))

    @classmethod
    def of_transfer(
        cls, error: PacelineError | OSError, rank: int, *, is_certain: bool = True
    ) -> SharedMemoryFailure:
        """Why this rank did not get the memory of another rank of its host."""
        if isinstance(error, PacelineError):
            found = cls(f"{error.summary} {error.seen}", error.likely, error.hint, is_limit=is_certain)
        else:
            found = cls.of_system(error, f"take it from rank {rank}")
        if not found.likely:
            found = replace(found, likely=_SANDBOX, remedy=_ALLOW, is_limit=is_certain)
        return replace(found, owner=rank)

    def facts(self) -> dict[str, Any]:
        return dict(vars(self))


def raise_limits(reported: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise the same error on all ranks if one of them has reached a limit."""
    at_limit = [rank for rank, each in enumerate(reported) if each["is_limit"]]
    # If a rank could not create its memory, do not also name the ranks that therefore did not get it.
    failed = [rank for rank in at_limit if reported[rank]["owner"] not in at_limit]
    if failed:
        raise RegionError(
            f"{format_ranks(failed).capitalize()} could not take {what}.",
            seen="\n".join(f"rank {rank}: {reported[rank]['problem']}" for rank in failed),
            likely=reported[failed[0]]["likely"],
            hint=f"on {format_ranks(failed)}: {reported[failed[0]]['remedy']}",
            ranks=tuple(failed),
        )
