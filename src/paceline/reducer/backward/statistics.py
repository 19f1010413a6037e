"""Figures of one model's backward passes that cost nothing extra: `stats()`, norms, waiting times.

Nothing here reads a gradient or calls another rank. A reducer is replaced with its plan; its counts are taken
over before it is closed, so that the figures cover all backward passes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from paceline import _core
from paceline.reducer.backward.front_end_interface import Fingerprint, FrontEnd, Memory
from paceline.reducer.backward_errors import names_by_rank
from paceline.reducer.communicator import Communicator, Reduction
from paceline.reducer.reducer_interface import BackwardResult, BackwardTimes

_CLEARLY = 1.05
"""A rank is called slow if it works this many times as long as the others."""


@dataclass(frozen=True)
class Statistics:
    """What a rank knows of its backward passes, and of the ranks that take part in them.

    Attributes:
        rank: This rank, among those that train the model.
        world_size: The number of these ranks.
        passes: As `num_good_passes`.
        path: As `gradient_path`.
        bits: As `bits`.
        waited_s: Seconds that this rank has waited for others at the end of backward, so far.
        waited_for_s: For each rank, how much of `waited_s` was because that rank came last. The rest was
            spent on chunks that other ranks were reducing, or on the network.
        worked_s: Each rank's median time from the end of one backward to the end of its next, without
            waiting, over the last backward passes (64 at most): data, forward, backward and optimizer. Every
            rank knows all of them. Empty before the second backward.
        times_last: In how many backward passes each rank was the last to reach the end, except for the first
            ones, in which it is not known how long all have worked. Every rank knows this, too.
        held_up_s: For each rank, how much later it came than the mean of the other ranks when it was the
            last, summed over all backward passes. This is what the others would have gained if it had been as
            fast.
        num_buckets: How many buckets a backward averages.
        pass_bytes: How many bytes of gradients a backward averages on each rank, including alignment.
        nonfinite: As `nonfinite()`; empty if the model does not look for them.
        num_unused: How many parameters this rank left without a gradient in the last backward.

    Example:
        Rank 1 of two takes 30 ms for each step and rank 0 takes 20; on rank 0, after 100 steps:
        `stats.waited_for_s` is about (0.0, 1.0), `stats.worked_s` about (0.02, 0.03), `stats.slow_rank` 1,
        `stats.times_last` (0, 98) and `stats.held_up_s` (0.0, 0.98).
    """

    rank: int
    world_size: int
    passes: int
    path: str
    bits: str
    waited_s: float
    waited_for_s: tuple[float, ...]
    worked_s: tuple[float, ...]
    times_last: tuple[int, ...]
    held_up_s: tuple[float, ...]
    num_buckets: int
    pass_bytes: int
    nonfinite: Mapping[int, tuple[str, ...]]
    num_unused: int

    @property
    def slow_rank(self) -> int | None:
        """The rank that the others wait for: it works at least 5 % longer than the median of the others."""
        if len(self.worked_s) < 2:
            return None
        slowest = max(range(len(self.worked_s)), key=self.worked_s.__getitem__)
        others = [seconds for rank, seconds in enumerate(self.worked_s) if rank != slowest]
        return slowest if self.worked_s[slowest] > _CLEARLY * statistics.median(others) else None


class FreshGradients:
    """Detects changes to gradients since the last backward, so that its norm can be reused.

    A gradient that was replaced is another object, and one that the framework changed has another version.
    Writes past the framework (through `.data`, numpy or a kernel) are detected by sampling a few cache lines
    of each gradient, so a write to only a few elements may go undetected.
    """

    def __init__(self, fingerprint: Callable[[], Fingerprint], memory: Callable[[], Memory | None]) -> None:
        self.is_used = False
        self._fingerprint = fingerprint
        self._memory = memory
        self._seen: Fingerprint | None = None
        self._sample: int | None = None

    def note(self) -> None:
        self._sample = self._take_sample()
        self._seen = None if self._sample is None else self._fingerprint()

    def forget(self) -> None:
        self._seen = None

    def are_unchanged(self) -> bool:
        self.is_used = True
        return (
            self._seen is not None
            and self._seen == self._fingerprint()
            and self._sample == self._take_sample()
        )

    def _take_sample(self) -> int | None:
        memory = self._memory()
        return None if memory is None else _core.sample_all(*memory)


@final
class BackwardStatistics:
    """The figures of one model's backward passes. None of the methods is collective.

    Attributes:
        fresh: Detects changes to gradients since the last backward.
        result: The result of the last backward; None if there was none, or it raised. `BackwardSync` writes
            it, and clears it and `earlier_norm` at each end.
        earlier_norm: The squared norm of the last backward, if its reducer has been replaced since.
    """

    def __init__(
        self, front_end: FrontEnd[Any], communicator: Communicator[Any], *, asks_for_nonfinite: bool
    ) -> None:
        self.fresh = FreshGradients(front_end.gradients.fingerprint, front_end.gradients.memory)
        self.result: BackwardResult | None = None
        self._tensors, self._sparse = front_end.tensors, front_end.sparse
        self._communicator, self._asks_for_nonfinite = communicator, asks_for_nonfinite
        self._reduction: Reduction[Any]
        self._times = BackwardTimes(communicator.world_size)
        self.earlier_norm: float | None = None

    def use(self, communicator: Communicator[Any], reduction: Reduction[Any]) -> None:
        self._communicator, self._reduction = communicator, reduction
        earlier, self._times = self._times, reduction.reducer.times
        self._times.add(earlier)

    def take_over(self) -> None:
        self.earlier_norm = self._reduction.reducer.squared_norm()

    def times(self) -> BackwardTimes:
        return self._times

    @property
    def waited_s(self) -> float:
        return self._times.waited_ns / 1e9

    def squared_norm(self) -> float:
        norm = self.earlier_norm
        if norm is None:
            norm = self._reduction.reducer.squared_norm()
        return norm + self._sparse.squared_norm

    def known_norm(self) -> float | None:
        if not self.fresh.are_unchanged() or self.result is None or self.result.globally_unused:
            return None
        norm = math.sqrt(self.squared_norm())
        return None if math.isnan(norm) else norm  # NaN for a void backward, too

    @property
    def looks_for_nonfinite(self) -> bool:
        return self._communicator.path != "group" or self._asks_for_nonfinite

    def nonfinite(self) -> dict[int, tuple[str, ...]]:
        pairs = () if self.result is None else self.result.nonfinite
        found = names_by_rank(pairs, self._tensors.names)
        for rank, names in names_by_rank(self._sparse.nonfinite, self._tensors.all_names).items():
            found[rank] = (*found.get(rank, ()), *names)
        return found

    def now(self, good_backwards: int) -> Statistics:
        communicator, plan, times = self._communicator, self._reduction.plan, self._times
        unused = () if self.result is None else self.result.unused[communicator.rank]
        return Statistics(
            rank=communicator.rank,
            world_size=communicator.world_size,
            passes=good_backwards,
            path=communicator.path,
            bits=communicator.bits,
            waited_s=self.waited_s,
            waited_for_s=tuple(ns / 1e9 for ns in times.waited_for_ns),
            worked_s=tuple(statistics.median(recent) / 1e9 for recent in times.recent_ns if recent),
            times_last=tuple(times.times_last),
            held_up_s=tuple(ns / 1e9 for ns in times.held_up_ns),
            num_buckets=len(plan.buckets),
            pass_bytes=sum(bucket.nbytes for bucket in plan.buckets),
            nonfinite=self.nonfinite() if self.looks_for_nonfinite else {},
            num_unused=len(unused) if good_backwards else 0,
        )
