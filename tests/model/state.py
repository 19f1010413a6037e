"""What the ranks of the model share, what each of them knows, and what lies in its memory.

Names are those of `cpp/reducer/reducer.h`. Every word of the shared state is one atomic there; a step of the
model is one operation on one of them, or one access to plain memory between two such operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Setting:
    """What is searched: how many ranks and passes, what may happen to them, and a mistake, if any."""

    ranks: int
    chunks: tuple[int, ...]  # of each bucket
    passes: int = 1
    unused: tuple[int, int] | None = None  # in this pass, this rank leaves bucket 0 out: nothing is reduced
    assigned: bool = False  # chunks belong to ranks, and are not claimed
    deaths: int = 0  # that may happen, anywhere
    deadlines: int = 0  # that may pass: whoever they wait for was stopped, and continues later
    leaver: tuple[int, int] | None = None  # in this pass, this rank leaves before it has posted all
    mistake: str = ""

    @property
    def total(self) -> int:
        return sum(self.chunks)


class Shared(NamedTuple):
    arrived: tuple[int, ...]  # of each bucket
    claim: tuple[tuple[int, int], ...]  # of each bucket: pass, next chunk
    chunks_done: int = 0
    chunks_poisoned: bool = False  # a bit of chunks_done
    ended: int = 0
    flags: bool = False  # something is unused
    ended_pass: int = 0
    ended_poisoned: bool = False  # a bit of ended_pass
    verdict: bool = False
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
    takes_all: bool = False  # Appetite::kAll
    asleep: bool = False
    number: int = 1  # of the pass
    good: int = 0  # passes that it has the means of
    posted: int = 0  # a bit for each bucket
    bucket: int = -1  # that is being posted
    done: tuple[int, ...] = ()  # chunks that it reduced, of each bucket
    exhausted: int = 0
    chunk: tuple[int, int] | None = None  # in hand
    seen: tuple[int, int] = (-1, -1)  # bell and departures, before the last look
    restarts: int = 0
    late_claims: int = 0  # chunks begun after the end of the group


# What lies in a rank's memory for a chunk, and of which pass.
NOTHING, GRADIENT, HALF, MEAN = "-", "gradient", "half", "mean"
Cells = tuple[tuple[tuple[str, int], ...], ...]


class State(NamedTuple):
    shared: Shared
    ranks: tuple[Rank, ...]
    cells: Cells


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
    return State(shared, (rank,) * setting.ranks, (((NOTHING, 0),) * setting.total,) * setting.ranks)


def replaced(items: tuple, index: int, item) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], item, *items[index + 1 :])
