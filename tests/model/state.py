"""The state of the model: the shared words, the private variables of each rank, and its memory.

The names are those of `cpp/reducer/reducer.h`. Every word of the shared state is one atomic there; a step of
the model is one operation on one of them, or one access to plain memory between two such operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Backward:
    """The ranks that leave bucket 0 out of a backward, and whether that is allowed."""

    left_out: tuple[int, ...] = ()  # the ranks that leave it out
    allowed_by: tuple[int, ...] = ()  # allow_unused, which each rank declares for itself
    globally_unused: bool = False  # allow_globally_unused, the same on all ranks
    finished: int | None = None  # this rank has no data: it leaves every bucket out, and allows that

    def left_out_by(self, rank: int, buckets: int) -> int:
        """The buckets that a rank leaves out: a bit for each."""
        return (1 << buckets) - 1 if rank == self.finished else int(rank in self.left_out)

    def is_allowed_by(self, rank: int) -> bool:
        return rank in self.allowed_by or rank == self.finished

    def is_good(self, ranks: int) -> bool:
        """The verdict that all ranks must reach, computed from all of them at once."""
        with_data = set(range(ranks)) - {self.finished}
        is_globally_unused = self.globally_unused and set(self.left_out) >= with_data
        return is_globally_unused or all(map(self.is_allowed_by, self.left_out))


PLAIN = Backward()


@dataclass(frozen=True)
class Setting:
    """A setting to search: ranks and their backwards, the possible faults, and a mistake, if any."""

    ranks: int
    chunks: tuple[int, ...]  # of each bucket
    backwards: tuple[Backward, ...] = (PLAIN,)
    assigned: bool = False  # chunks belong to ranks, and are not claimed
    deaths: int = 0  # the number of deaths that may happen, anywhere
    deadlines: int = 0  # the number that may pass: the late rank was stopped, and continues later
    leaver: tuple[int, int] | None = None  # in this backward, this rank leaves before it has posted all
    mistake: str = ""

    @property
    def total(self) -> int:
        return sum(self.chunks)


class Shared(NamedTuple):
    arrived: tuple[int, ...]  # of each bucket
    claim: tuple[tuple[int, int], ...]  # of each bucket: backward, next chunk
    chunks_done: int = 0
    chunks_poisoned: bool = False  # a bit of chunks_done
    ended: int = 0
    flags: int = 0  # of the backward that is ending: UNUSED, REFUSED
    ended_backward: int = 0
    ended_poisoned: bool = False  # a bit of ended_backward
    verdict: int = 0
    restarted: int = 0
    bell: int = 0
    sleepers: int = 0
    abort: bool = False
    departures: int = 0
    deaths: int = 0  # that may still happen
    deadlines: int = 0


class Rank(NamedTuple):
    at: str = "begin"  # its next step
    awaits: str = ""  # the condition that wait_until() waits for: ended, means, void, reset
    then: str = ""  # where progress() returns to
    takes_all: bool = False  # ChunkLimit::kAll
    asleep: bool = False
    number: int = 1  # of the current backward
    good: int = 0  # the number of backwards whose means it has
    posted: int = 0  # a bit for each bucket
    bucket: int = -1  # the bucket that is being posted
    done: tuple[int, ...] = ()  # the number of chunks that it has reduced, of each bucket
    exhausted: int = 0
    chunk: tuple[int, int] | None = None  # the chunk in work
    seen: tuple[int, int] = (-1, -1)  # bell and departures, before the last look
    restarts: int = 0
    late_claims: int = 0  # chunks begun after the end of the group


UNUSED, REFUSED = 1, 2  # kBackwardUnused, kBackwardUnusedRefused

# The contents of a rank's memory for a chunk, with the number of the backward.
NOTHING, GRADIENT, HALF, MEAN = "-", "gradient", "half", "mean"
Cells = tuple[tuple[tuple[str, int], ...], ...]

# A rank's report on its backward: its number, the buckets that the rank left out, whether it had data. A rank
# has two places for reports, and alternates between them.
Reports = tuple[tuple[tuple[int, int, bool], ...], ...]


class State(NamedTuple):
    shared: Shared
    ranks: tuple[Rank, ...]
    cells: Cells
    reports: Reports


OVER = {"dead", "raised", "left", "finished"}


def first_state(setting: Setting) -> State:
    buckets = len(setting.chunks)
    shared = Shared(
        arrived=(0,) * buckets,
        claim=((0, 0),) * buckets,
        deaths=setting.deaths,
        deadlines=setting.deadlines,
    )
    rank = Rank(done=(0,) * buckets)
    cells = (((NOTHING, 0),) * setting.total,) * setting.ranks
    return State(shared, (rank,) * setting.ranks, cells, (((0, 0, True),) * 2,) * setting.ranks)


def replaced(items: tuple, index: int, item) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], item, *items[index + 1 :])
