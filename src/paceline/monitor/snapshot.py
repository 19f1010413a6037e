"""Computes what a job does now from the newest records of its ranks, in one pure function.

All rates are over a window of some seconds. A step is a backward that is averaged. All views display this
snapshot, and compute nothing themselves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.trace.records import Event, Record, backward_of, bits_float
from paceline.trace.remote_ranks import RemoteRank, State
from paceline.trace.ring_file import RankHeader
from paceline.trace.slow_ranks import Span
from paceline.trace.totals import Total

BackwardKey = tuple[int, int]

_BEGUN = {
    Event.FORWARD_BEGAN: "forward",
    Event.FORWARD_ENDED: "",
    Event.BACKWARD_BEGAN: "backward",
    Event.BACKWARD_ENDED: "average",
    Event.AVERAGING_ENDED: "",
    Event.OPTIMIZER_BEGAN: "optimizer",
    Event.OPTIMIZER_ENDED: "",
    Event.DATA_BEGAN: "data",
    Event.DATA_ENDED: "",
}
_LATE_NS = 3_000_000_000  # a rank of another host reports its figures once a second
_SAMPLES = "samples"  # a value of this name counts instead of batch sizes


@dataclass(frozen=True)
class RankWindow:
    """The newest records of one rank.

    Attributes:
        header: Identifies the rank.
        records: Oldest first.
        names: The names of logged values, by their number.
        failures: The time (CLOCK_MONOTONIC) and text of each exception that ended a backward or the program;
            oldest first.
        is_alive: Whether its process runs.
        memory_bytes: Memory of the process; None: unknown.
        is_memory_shared: Whether shared memory counts in full for each rank (RSS), rather than being divided
            among the ranks that share it (PSS).
    """

    header: RankHeader
    records: Sequence[Record]
    names: Mapping[int, str] = field(default_factory=dict)
    failures: Sequence[tuple[int, str]] = ()
    is_alive: bool = True
    memory_bytes: int | None = None
    is_memory_shared: bool = True


@dataclass(frozen=True)
class RankSnapshot:
    """What one rank does now.

    Attributes:
        rank: The rank.
        pid: Its process id.
        host: Its host.
        is_alive: Whether the process runs.
        doing: "data", "forward", "backward", "average" or "optimizer"; "": something between them.
        silent_s: Seconds since it recorded anything, or since its last report if it is on another host.
        step: How many backward passes of the model it has ended; None: unknown.
        steps_per_s: Backward passes per second; 0.0 if fewer than two are known.
        samples_per_s: None: the size of batches is unknown.
        worked_s: Median seconds from the end of a backward to the end of its next backward, without waiting.
        waiting: Part of the window that it has waited at the end of backward, from 0 to 1.
        waits_for: The rank that it has waited for most in the window, up to now; None: none.
        memory_bytes: None: unknown.
        is_memory_shared: Whether memory that ranks share counts in full for each of them.
        values: The values that it has logged last, by name.
        norm: The last recorded 2-norm of the mean gradient; None: none was recorded.
        nonfinite: How many gradients held an infinity or a NaN in the window, over all backward passes.
        nonfinite_rank: The first rank whose gradients did in the last of these; None: none.
        failed: How many backward passes of the window raised; on another host, 1 if `failure` is set.
        failure: The last exception of a backward or of the program; "": none.
        is_recovered: Whether it has ended a good backward since that exception.
        is_far: Whether it runs on another host. `doing`, `norm`, `nonfinite` and `is_recovered` are not known
            then.
    """

    rank: int
    pid: int
    host: str
    is_alive: bool
    doing: str
    silent_s: float
    step: int | None
    steps_per_s: float
    samples_per_s: float | None
    worked_s: float | None
    waiting: float
    waits_for: int | None
    memory_bytes: int | None
    is_memory_shared: bool
    values: Mapping[str, float]
    norm: float | None
    nonfinite: int
    nonfinite_rank: int | None
    failed: int
    failure: str
    is_recovered: bool
    is_far: bool = False


@dataclass(frozen=True)
class JobSnapshot:
    """What a job does now.

    Attributes:
        world_size: Number of ranks of the job.
        ranks: The ranks that record on this host, and on the host of rank 0 also those of the other hosts, in
            order. Ranks that have not begun are missing.
        step: The smallest of the ranks' steps.
        steps_per_s: The smallest of the ranks' rates.
        samples_per_s: The sum over all ranks; None: unknown for some rank.
        waited_for: For each rank that arrived last: the part of all ranks' time that was lost by waiting for
            it.
        slow_rank: The rank with the largest such part, if that is at least 5 %.
        cause: A clause that says why it is slow, in which the rank is "it"; "": unknown.
    """

    world_size: int
    ranks: tuple[RankSnapshot, ...]
    step: int | None
    steps_per_s: float
    samples_per_s: float | None
    waited_for: Mapping[int, float]
    slow_rank: int | None
    cause: str = ""


def snapshot(
    windows: Sequence[RankWindow],
    now_ns: int,
    remote: Sequence[RemoteRank] = (),
    spans: Mapping[int, Span] | None = None,
) -> JobSnapshot:
    """What the ranks did in their windows, and do now.

    Example:
        Rank 0 waits 30 of 100 ms in each backward, because rank 1 works for 90 ms and rank 0 for 60 ms. Then
        rank 0 has `waiting` 0.3 and `waits_for` 1, and `waited_for` is {1: 0.15}.
    """
    model = min((model for each in windows for model, _ in _ends(each)), default=0)
    arrivals = {each.header.rank: _arrivals(each) for each in windows}
    readers = [_RankReader(each, model, arrivals, now_ns) for each in windows]
    away = [_RemoteReader(each, spans or {}, now_ns) for each in remote]
    every: list[_RankReader | _RemoteReader] = [*readers, *away]
    ranks = tuple(sorted((reader.read() for reader in every), key=lambda each: each.rank))
    lost: dict[int, float] = defaultdict(float)
    for reader in every:
        for whom, part in reader.waited_for.items():
            lost[whom] += part / len(every)
    waited_for = {whom: part for whom, part in sorted(lost.items()) if part > 0}
    most = max(waited_for, key=waited_for.__getitem__, default=None)
    steps = [each.step for each in ranks if each.step is not None]
    rates = [each.samples_per_s for each in ranks if each.samples_per_s is not None]
    return JobSnapshot(
        world_size=max((reader.world_size for reader in every), default=0),
        ranks=ranks,
        step=min(steps, default=None),
        steps_per_s=min((each.steps_per_s for each in ranks), default=0.0),
        samples_per_s=sum(rates) if rates and len(rates) == len(ranks) else None,
        waited_for=waited_for,
        slow_rank=most if most is not None and waited_for[most] >= 0.05 else None,
    )


def _ends(window: RankWindow) -> list[BackwardKey]:
    return [backward_of(each.first) for each in window.records if each.event == Event.AVERAGING_ENDED]


def _arrivals(window: RankWindow) -> dict[BackwardKey, int]:
    ended = (each for each in window.records if each.event == Event.BACKWARD_ENDED)
    return {backward_of(each.first): each.time_ns for each in ended}


class _RankReader:
    def __init__(
        self, window: RankWindow, model: int, arrivals: Mapping[int, Mapping[BackwardKey, int]], now_ns: int
    ) -> None:
        self._window, self._model, self._arrivals = window, model, arrivals
        self.world_size = window.header.world_size
        self._records = window.records
        last_ns = self._records[-1].time_ns if self._records else now_ns
        self._now_ns = max(now_ns, last_ns) if window.is_alive else last_ns
        self._backwards = [each for each in self._records if each.event in _OF_BACKWARDS]
        first = self._backwards[0] if self._backwards else None
        self._begin_ns = self._now_ns if first is None else first.time_ns
        self.waited_for: dict[int, float] = {}  # parts of the window

    def read(self) -> RankSnapshot:
        window, header = self._window, self._window.header
        waiting = self._read_waits()
        ends = self._ends()
        values = self._values()
        good = [each for each in ends if not each.second]
        nonfinite = [each for each in self._records if each.event == Event.NONFINITE]
        failed_ns, failure = window.failures[-1] if window.failures else (0, "")
        last_ns = self._records[-1].time_ns if self._records else header.monotonic_ns
        norm = next((e for e in reversed(self._records) if e.event == Event.NORM), None)
        return RankSnapshot(
            rank=header.rank,
            pid=header.pid,
            host=header.host,
            is_alive=window.is_alive,
            doing=self._doing(),
            silent_s=max(0, self._now_ns - last_ns) / 1e9,
            step=backward_of(ends[-1].first)[1] if ends else None,
            steps_per_s=self._rate([each.time_ns for each in ends]),
            samples_per_s=self._samples(ends),
            worked_s=self._worked(ends),
            waiting=waiting,
            waits_for=max(self.waited_for, key=self.waited_for.__getitem__, default=None),
            memory_bytes=window.memory_bytes,
            is_memory_shared=window.is_memory_shared,
            values=values,
            norm=None if norm is None or math.isnan(bits_float(norm.second)) else bits_float(norm.second),
            nonfinite=sum(each.second >> 32 for each in nonfinite),
            nonfinite_rank=nonfinite[-1].second & 0xFFFFFFFF if nonfinite else None,
            failed=sum(1 for each in ends if each.second),
            failure=failure,
            is_recovered=bool(failure) and any(each.time_ns > failed_ns for each in good),
        )

    def _ends(self) -> list[Record]:
        return [
            each
            for each in self._backwards
            if each.event == Event.AVERAGING_ENDED and backward_of(each.first)[0] == self._model
        ]

    def _doing(self) -> str:
        last = next((each for each in reversed(self._records) if each.event in _BEGUN), None)
        return "" if last is None else _BEGUN[Event(last.event)]

    def _rate(self, times_ns: Sequence[int], per: float = 1.0) -> float:
        """Events per second; falls when the last event is longer ago than usual."""
        if len(times_ns) < 2:
            return 0.0
        took_ns = times_ns[-1] - times_ns[0]
        since_ns = self._now_ns - times_ns[-1]
        if took_ns <= 0:
            return 0.0
        is_late = since_ns > 2 * took_ns / (len(times_ns) - 1)
        return (len(times_ns) - 1) * per * 1e9 / (took_ns + since_ns if is_late else took_ns)

    def _samples(self, ends: Sequence[Record]) -> float | None:
        if len(ends) < 2:
            return None
        begin_ns, end_ns = ends[0].time_ns, ends[-1].time_ns
        logged = [
            bits_float(each.second)
            for each in self._records
            if each.event == Event.LOGGED
            and self._window.names.get(each.first) == _SAMPLES
            and begin_ns < each.time_ns <= end_ns
        ]
        seen = [
            each.second >> 1
            for each in self._backwards
            if each.event == Event.FORWARD_BEGAN
            and backward_of(each.first)[0] == self._model
            and begin_ns <= each.time_ns < end_ns
        ]
        found = sum(logged) if logged else sum(seen)
        if not found:
            return None
        return self._rate([each.time_ns for each in ends], found / (len(ends) - 1))

    def _worked(self, ends: Sequence[Record]) -> float | None:
        own = self._arrivals[self._window.header.rank]
        spans = []
        for each in ends:
            model, number = backward_of(each.first)
            arrived_ns = own.get((model, number + 1))
            if arrived_ns is not None and arrived_ns > each.time_ns:
                spans.append((arrived_ns - each.time_ns) / 1e9)
        return median(spans) if spans else None

    def _values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for each in self._records:
            if each.event == Event.LOGGED:
                name = self._window.names.get(each.first)
                if name is not None:
                    found[name] = bits_float(each.second)
        return found

    # --- waiting ---

    def _read_waits(self) -> float:
        length_ns = self._now_ns - self._begin_ns
        if length_ns <= 0:
            return 0.0
        waits: list[tuple[int, int, Sequence[int]]] = []
        key: BackwardKey | None = None
        for each in self._backwards:
            if each.event == Event.BACKWARD_ENDED:
                key = backward_of(each.first)
            elif each.event == Event.WAITED:
                begin_ns = max(each.first, self._begin_ns)
                while waits and waits[-1][0] >= begin_ns:  # between hosts, a wait may contain earlier ones
                    waits.pop()
                if each.time_ns > begin_ns:
                    waits.append((begin_ns, each.time_ns, self._last_of(key, each.second)))
            elif each.event == Event.AVERAGING_ENDED:
                key = None
        since_ns, missing = self._waits_now(key)
        if since_ns:
            waits.append((since_ns, self._now_ns, missing))
        total_ns = sum(end_ns - begin_ns for begin_ns, end_ns, _ in waits)
        lost: Counter[int] = Counter()
        for begin_ns, end_ns, whose in waits:
            for whom in whose:
                lost[whom] += (end_ns - begin_ns) // len(whose)
        self.waited_for = {whom: took_ns / length_ns for whom, took_ns in lost.items()}
        return min(1.0, total_ns / length_ns)

    def _last_of(self, key: BackwardKey | None, reported: int) -> Sequence[int]:
        if reported < 0 and key is not None:  # not reported: find the last arrival, if all ranks are here
            came = {rank: times[key] for rank, times in self._arrivals.items() if key in times}
            reported = max(came, key=came.__getitem__) if len(came) == self.world_size > 1 else -1
        return (reported,) if reported >= 0 and reported != self._window.header.rank else ()

    def _waits_now(self, key: BackwardKey | None) -> tuple[int, list[int]]:
        """When the current wait at the end of a backward began, and the ranks that have not arrived yet.

        The time is 0 if the rank does not wait. The list is empty if all ranks of this host have arrived: for
        ranks of other hosts that is not known.
        """
        if key is None or not self._window.is_alive:
            return 0, []
        came_ns = self._arrivals[self._window.header.rank][key]
        has_waited = any(
            e.event == Event.WAITED and e.time_ns >= came_ns for e in reversed(self._backwards[-8:])
        )
        missing = [rank for rank, times in self._arrivals.items() if key not in times]
        if has_waited or (not missing and len(self._arrivals) >= self.world_size):
            return 0, []
        return max(came_ns, self._begin_ns), missing


class _RemoteReader:
    def __init__(self, remote: RemoteRank, spans: Mapping[int, Span], now_ns: int) -> None:
        self._remote, self._now_ns = remote, now_ns
        self._header = remote.recording.header
        self.world_size = self._header.world_size
        span = spans.get(self._header.rank)
        is_known = span is not None and span.passes > 0 and span.grown.get(Total.TIME_NS, 0.0) > 0
        self._span = span if is_known else None
        self.waited_for = self._waits(spans)  # parts of the time

    def read(self) -> RankSnapshot:
        words, header, span = self._remote.words, self._header, self._span
        rate = 0.0 if span is None else self._rate(span)
        samples = words.values.get(_SAMPLES)
        if samples is None and span is not None:
            samples = span.of_step(Total.SAMPLES)
        worked_ns = None if span is None else span.of_step(Total.WORKED_NS)
        return RankSnapshot(
            rank=header.rank,
            pid=header.pid,
            host=header.host,
            is_alive=self._remote.state == State.LIVE,
            doing="",
            silent_s=self._silent_ns / 1e9,
            step=words.step,
            steps_per_s=rate,
            samples_per_s=None if not samples or span is None else rate * samples,
            worked_s=None if worked_ns is None else worked_ns / 1e9,
            waiting=sum(self.waited_for.values()),
            waits_for=max(self.waited_for, key=self.waited_for.__getitem__, default=None),
            memory_bytes=words.memory_bytes,
            is_memory_shared=True,
            values=words.values,
            norm=None,
            nonfinite=0,  # the ranks of this host report the same ones
            nonfinite_rank=None,
            failed=int(bool(words.failure)),
            failure=words.failure,
            is_recovered=False,
            is_far=True,
        )

    @property
    def _silent_ns(self) -> int:
        return max(0, self._now_ns - self._remote.received_ns)

    def _rate(self, span: Span) -> float:
        """Backward passes per second; falls when the last report is longer ago than usual."""
        took_ns = span.grown[Total.TIME_NS]
        is_late = self._silent_ns > _LATE_NS
        return span.passes * 1e9 / (took_ns + self._silent_ns if is_late else took_ns)

    def _waits(self, spans: Mapping[int, Span]) -> dict[int, float]:
        span = self._span
        if span is None:
            return {}
        waiting = min(1.0, max(0.0, 1 - span.grown.get(Total.WORKED_NS, 0.0) / span.grown[Total.TIME_NS]))
        held_ns = {
            rank: ns
            for rank, each in spans.items()
            if rank != self._header.rank and (ns := each.grown.get(Total.HELD_UP_NS, 0.0)) > 0
        }
        return {rank: waiting * ns / sum(held_ns.values()) for rank, ns in held_ns.items()}


_OF_BACKWARDS = frozenset(
    (
        Event.FORWARD_BEGAN,
        Event.BACKWARD_BEGAN,
        Event.BACKWARD_ENDED,
        Event.AVERAGING_ENDED,
        Event.WAITED,
    )
)
