"""What the ranks of the model share, what each of them knows, and what lies in its memory.

Names are those of `cpp/reducer/reducer.h`. Every word of the shared state is one atomic there; a step of the
model is one operation on one of them, or one access to plain memory between two such operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Backward:
    """Who leaves bucket 0 out of a backward, and whether that is allowed."""

    left_out: tuple[int, ...] = ()  # by these ranks
    allowed_by: tuple[int, ...] = ()  # allow_unused, which each rank says for itself
    globally_unused: bool = False  # allow_globally_unused, the same on all ranks
    finished: int | None = None  # this rank has no data: it leaves every bucket out, and allows that

    def left_out_by(self, rank: int, buckets: int) -> int:
        """The buckets that a rank leaves out: a bit for each."""
        return (1 << buckets) - 1 if rank == self.finished else int(rank in self.left_out)

    def is_allowed_by(self, rank: int) -> bool:
        return rank in self.allowed_by or rank == self.finished

    def is_good(self, ranks: int) -> bool:
        """What all ranks must find, told by somebody who sees all of them at once."""
        with_data = set(range(ranks)) - {self.finished}
        is_globally_unused = self.globally_unused and set(self.left_out) >= with_data
        return is_globally_unused or all(map(self.is_allowed_by, self.left_out))


PLAIN = Backward()


@dataclass(frozen=True)
class Setting:
    """What is searched: ranks and their backward passes, what may happen to them, and a mistake, if any."""

    ranks: int
    chunks: tuple[int, ...]  # of each bucket
    backwards: tuple[Backward, ...] = (PLAIN,)
    assigned: bool = False  # chunks belong to ranks, and are not claimed
    deaths: int = 0  # that may happen, anywhere
    deadlines: int = 0  # that may pass: whoever they wait for was stopped, and continues later
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
    deaths: int = 0  # left to happen
    deadlines: int = 0


class Rank(NamedTuple):
    at: str = "begin"  # its next step
    awaits: str = ""  # what wait_until() waits for: ended, means, void, reset
    then: str = ""  # where progress() returns to
    takes_all: bool = False  # ChunkLimit::kAll
    asleep: bool = False
    number: int = 1  # of the backward
    good: int = 0  # backward passes that it has the means of
    posted: int = 0  # a bit for each bucket
    bucket: int = -1  # that is being posted
    done: tuple[int, ...] = ()  # chunks that it reduced, of each bucket
    exhausted: int = 0
    chunk: tuple[int, int] | None = None  # in hand
    seen: tuple[int, int] = (-1, -1)  # bell and departures, before the last look
    restarts: int = 0
    late_claims: int = 0  # chunks begun after the end of the group


UNUSED, REFUSED = 1, 2  # kBackwardUnused, kBackwardUnusedRefused

# What lies in a rank's memory for a chunk, and of which backward.
NOTHING, GRADIENT, HALF, MEAN = "-", "gradient", "half", "mean"
Cells = tuple[tuple[tuple[str, int], ...], ...]

# What a rank says of its backward beside those: its number, the buckets it left out, whether it had data. It
# has two places for that, and takes them in turn.
Told = tuple[tuple[tuple[int, int, bool], ...], ...]


class State(NamedTuple):
    shared: Shared
    ranks: tuple[Rank, ...]
    cells: Cells
    told: Told


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
