"""The report that pytest shows of failed ranks: how each failed, in which order, and its whole output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_LOG_LINES = 150


class Cause(IntEnum):
    """How a rank failed, in the order of the report: a death makes its peers raise, never the reverse."""

    DIED = 0
    RAISED = 1
    MISBEHAVED = 2
    HUNG = 3


@dataclass(frozen=True)
class Failure:
    """One rank that failed."""

    rank: int
    cause: Cause
    summary: str
    at_s: float = 0.0
    details: str = ""
    log: str = ""


class RanksFailed(AssertionError):
    """A rank failed, or something was left behind. `failures` lists the ranks, likely culprit first."""

    def __init__(
        self,
        program: str,
        world_size: int,
        failures: list[Failure],
        leftovers: list[str],
        earlier: Sequence[str] = (),
    ) -> None:
        self.failures = sorted(failures, key=lambda f: (f.cause, f.at_s, f.rank))
        self.leftovers = leftovers
        super().__init__(_render(program, world_size, self.failures, leftovers, earlier))


def _render(
    program: str, world_size: int, failures: list[Failure], leftovers: list[str], earlier: Sequence[str]
) -> str:
    parts = []
    if failures:
        parts.append(f"{program}: {len(failures)} of {world_size} ranks failed")
        parts.extend(f"  rank {failure.rank} {failure.summary}" for failure in failures)
    else:
        parts.append(f"{program}: every rank was fine, but something was left behind")
    parts.extend(f"  left behind: {leftover}" for leftover in leftovers)
    if earlier:
        parts.append(f"  the same processes had run before, the latest last: {', '.join(earlier)}")
    for failure in failures:
        parts.extend(_section(failure))
    return "\n".join(parts)


def _section(failure: Failure) -> list[str]:
    parts = [f"\n----- rank {failure.rank} {failure.summary} -----"]
    if failure.details:
        parts.append(failure.details)
    if failure.log:
        lines = failure.log.rstrip().splitlines()
        left_out = len(lines) - _LOG_LINES
        parts.append(f"----- rank {failure.rank} printed -----")
        if left_out > 0:
            parts.append(f"({left_out} lines before these)")
        parts.extend(lines[-_LOG_LINES:])
    return parts
