"""Finds the rank that the others wait for, and the cause, in the totals of the ranks, and describes both.

Backward is a barrier, so all ranks have the same step time, and only the time that a rank works by itself
shows that it is slow. Anything of which a rank has more per step than the others may be the cause. The cause
that explains most of the difference is named.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.trace.ring_file import RankRecording
from paceline.trace.totals import Total, Totals

_EXPLAINS = 0.4
"""A cause is named only if it explains this part of the time that a rank works longer than the others."""
_MINOR_FAULT_NS = 500
"""Approximate time in which the kernel clears and maps a page."""
_MAJOR_FAULT_NS = 100_000
"""Approximate time in which a fast disk reads a page."""
_MOST_OF_IT = 0.5
"""If one step has this part of all the time for which the others waited, a mean per step would mislead."""
_MOST_SHOWN = 3
"""Most ranks that are reported; users would not read more."""


@dataclass(frozen=True)
class Limits:
    """The least that must have been measured before a rank is called slow.

    Attributes:
        passes: Number of backward passes.
        seconds: Time that they took.
        lost_s: Total time that the others waited for the rank.
        part: Part of a step by which the rank works longer than the median of the others.
        share: Part of the backward passes in which the rank was last. So a checkpoint that rank 0 writes
            now and then does not count, ...
        rarely_lost_s: ... unless the others have waited for it this long in total.
    """

    passes: int
    seconds: float
    lost_s: float
    part: float = 0.1
    share: float = 0.25
    rarely_lost_s: float = math.inf


AT_THE_END = Limits(passes=20, seconds=0.0, lost_s=1.0, rarely_lost_s=10.0)
"""Limits for a sentence when a job has ended."""
WHILE_IT_RUNS = Limits(passes=100, seconds=10.0, lost_s=1.0)
"""Limits for a warning."""


@dataclass(frozen=True)
class Span:
    rank: int
    world_size: int
    host: str
    grown: Totals

    @property
    def passes(self) -> int:
        return int(self.grown.get(Total.BACKWARDS, 0))

    @property
    def step_ns(self) -> float:
        return self.grown[Total.TIME_NS] / self.passes

    def of_step(self, total: Total) -> float | None:
        grown = self.grown.get(total)
        return None if grown is None else grown / self.passes


@dataclass(frozen=True)
class Cause:
    """Why a rank works longer than the others.

    Attributes:
        kind: Its key in `_CAUSES` or `_WHEREABOUTS`.
        text: A clause that describes it, in which the rank is "it".
    """

    kind: str
    text: str


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    Attributes:
        span: Its totals over the time that was measured.
        share: Part of the backward passes in which it was last.
        held_up_ns: How much later than the others it arrived when it was last, averaged over all backward
            passes.
        longest_ns: How much later than the others it arrived in the backward for which that was most; None:
            unknown.
        cause: Why it is slow; None: unknown.
    """

    span: Span
    share: float
    held_up_ns: float
    longest_ns: float | None
    cause: Cause | None

    def sentence(self, when: str = "") -> str:
        span = self.span
        waited, why = f"{self.held_up_ns / 1e6:.1f} of {_ms(span.step_ns)} per step", "Why"
        total_ns = self.held_up_ns * span.passes
        if self.longest_ns is not None and self.longest_ns >= _MOST_OF_IT * total_ns:
            longest_ns = min(self.longest_ns, total_ns)
            waited = f"for {total_ns / 1e9:.1f} s in all, {longest_ns / 1e9:.1f} s of it in one step"
            why = "Why, as means of all steps"
        return (
            f"the others waited for rank {span.rank} of {span.world_size} (host {span.host}) in "
            f"{100 * self.share:.0f} % of {when}{span.passes} steps, {waited}. "
            + (f"{why}: {self.cause.text}." if self.cause else "The cause is not known.")
        )


def whole_spans(recordings: Sequence[RankRecording]) -> list[Span]:
    return [span_of(each, each.first) for each in recordings]


def span_of(recording: RankRecording, since: Totals) -> Span:
    header = recording.header
    grown = {total: value - since[total] for total, value in recording.last.items() if total in since}
    if grown.pop(Total.LONGEST_HELD_UP_NS, 0.0) > 0:  # it was in this span
        grown[Total.LONGEST_HELD_UP_NS] = recording.last[Total.LONGEST_HELD_UP_NS]
    return Span(header.rank, header.world_size, header.host, grown)


def slow_ranks(spans: Sequence[Span], limits: Limits) -> list[SlowRank]:
    """The ranks that the others wait for, the slowest first, three at most; empty if no rank is slow."""
    able = [span for span in spans if span.passes >= max(1, limits.passes)]
    found: list[tuple[float, SlowRank]] = []
    for span in able:
        others = [other for other in able if other is not span]
        if not others or span.grown[Total.TIME_NS] < limits.seconds * 1e9:
            continue
        more_ns = _more(span, others, Total.WORKED_NS)
        share = span.grown[Total.TIMES_LAST] / span.passes
        held_up_ns = span.grown[Total.HELD_UP_NS]
        if (
            more_ns >= limits.part * span.step_ns
            and held_up_ns >= (limits.lost_s if share >= limits.share else limits.rarely_lost_s) * 1e9
        ):
            cause = find_cause(span, others, more_ns)
            longest_ns = span.grown.get(Total.LONGEST_HELD_UP_NS)
            found.append((more_ns, SlowRank(span, share, held_up_ns / span.passes, longest_ns, cause)))
    return [slow for _, slow in sorted(found, key=lambda each: -each[0])[:_MOST_SHOWN]]


def find_cause(span: Span, others: Sequence[Span], more_ns: float) -> Cause | None:
    """The cause that explains most of the time that a rank works longer than the others; None: unknown."""
    weighed = {kind: explains(span, others) for kind, (explains, _) in _CAUSES.items()}
    kind = max(weighed, key=weighed.__getitem__)
    if weighed[kind] >= _EXPLAINS * more_ns:
        return Cause(kind, _CAUSES[kind][1](span, others))
    for kind, (explains, describe) in _WHEREABOUTS.items():
        if explains(span, others) >= _EXPLAINS * more_ns:
            return Cause(kind, describe(span, others))
    return None


_Explains = Callable[[Span, Sequence[Span]], float]
"""How much longer a rank works per step because of one cause, in nanoseconds."""
_Describes = Callable[[Span, Sequence[Span]], str]


def _more(span: Span, others: Sequence[Span], total: Total) -> float:
    own, theirs = span.of_step(total), _of_others(others, total)
    return 0.0 if own is None or theirs is None else own - theirs


def _of_others(others: Sequence[Span], total: Total) -> float | None:
    values = [value for value in (other.of_step(total) for other in others) if value is not None]
    return median(values) if values else None


def _times(total: Total, template: str) -> tuple[_Explains, _Describes]:
    """`template` contains {own} and {others}."""

    def explains(span: Span, others: Sequence[Span]) -> float:
        return _more(span, others, total)

    def describe(span: Span, others: Sequence[Span]) -> str:
        return template.format(
            own=_ms(span.of_step(total) or 0.0), others=_ms(_of_others(others, total) or 0.0)
        )

    return explains, describe


def _faults(total: Total, each_ns: int, template: str) -> tuple[_Explains, _Describes]:
    def explains(span: Span, others: Sequence[Span]) -> float:
        return _more(span, others, total) * each_ns

    def describe(span: Span, others: Sequence[Span]) -> str:
        own, theirs = span.of_step(total) or 0.0, _of_others(others, total) or 0.0
        return template.format(own=f"{own:.4g}", others=f"{theirs:.4g}")

    return explains, describe


def _larger(total: Total, what: str) -> tuple[_Explains, _Describes]:
    def explains(span: Span, others: Sequence[Span]) -> float:
        own, theirs = span.of_step(total), _of_others(others, total)
        if not own or not theirs:
            return 0.0
        compute = [
            (other.of_step(Total.WORKED_NS) or 0.0) - (other.of_step(Total.BETWEEN_NS) or 0.0)
            for other in others
        ]
        return (own / theirs - 1) * max(0.0, median(compute))

    def describe(span: Span, others: Sequence[Span]) -> str:
        own, theirs = span.of_step(total) or 0.0, _of_others(others, total) or 1.0
        return f"{what} {own:.4g} in the mean, {own / theirs:.3g} times those of the others"

    return explains, describe


def _without_core(span: Span, others: Sequence[Span]) -> float:
    more = _more(span, others, Total.WORKED_NS)
    return more - max(0.0, _more(span, others, Total.CPU_NS)) if Total.CPU_NS in span.grown else 0.0


def _describe_between(span: Span, others: Sequence[Span]) -> str:
    own, theirs = span.of_step(Total.BETWEEN_NS) or 0.0, _of_others(others, Total.BETWEEN_NS) or 0.0
    known = {
        "data loading": span.of_step(Total.DATA_NS),
        "optimizer": span.of_step(Total.OPTIMIZER_NS),
    }
    reported = [f"{name} {_ms(value)}" for name, value in known.items() if value is not None]
    parts = (
        f"of it {', '.join(reported)}"
        if reported
        else "data, optimizer and all else: --trace tells them apart"
    )
    return (
        f"between a backward and the next forward it spent {_ms(own)} per step ({parts}), "
        f"the others {_ms(theirs)}"
    )


_CAUSES: Mapping[str, tuple[_Explains, _Describes]] = {
    "data": _times(Total.DATA_NS, "its data loading took {own} per step, that of the others {others}"),
    "optimizer": _times(Total.OPTIMIZER_NS, "its optimizer took {own} per step, that of the others {others}"),
    "throttling": _times(
        Total.THROTTLED_NS,
        "its control group was throttled for {own} per step (a quota of processor time), the others {others}",
    ),
    "steal": _times(
        Total.STOLEN_NS,
        "other virtual machines had its cores for {own} per step, and those of the others for {others}",
    ),
    "busy core": _times(
        Total.RUN_QUEUE_NS,
        "another process had its core for {own} per step, and those of the others for {others}",
    ),
    "disk": _faults(
        Total.MAJOR_FAULTS,
        _MAJOR_FAULT_NS,
        "it read {own} pages of its memory from a disk per step, the others {others}",
    ),
    "page faults": _faults(
        Total.MINOR_FAULTS, _MINOR_FAULT_NS, "it had {own} page faults per step, the others {others}"
    ),
    "weight": _larger(Total.WEIGHT, "the weights of its batches were"),
    "batch": _larger(Total.SAMPLES, "the samples of its batches were"),
}
# Where the time of a rank goes, if no cause above explains enough. The first of these that does is named.
_WHEREABOUTS: Mapping[str, tuple[_Explains, _Describes]] = {
    "between": (_times(Total.BETWEEN_NS, "")[0], _describe_between),
    "computing": _times(Total.CPU_NS, "it computed for {own} per step, the others {others}"),
    "waiting": (
        _without_core,
        lambda span, _: "it waited for something else than a core: a lock, a disk, a network or a GPU",
    ),
}


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms"


class CauseWatch:
    """Finds why a rank is slow, from how the totals have changed over the last seconds."""

    _SPAN_NS = 10_000_000_000

    def __init__(self) -> None:
        # Bounded, in case no rank writes new totals: their times decide which looks are old.
        self._looks: deque[dict[int, Totals]] = deque(maxlen=64)
        self._spans: list[Span] = []

    def look(self, recordings: Sequence[RankRecording]) -> None:
        now = {each.header.rank: each.last for each in recordings if each.last}
        before = self._looks[0] if self._looks else {}
        self._spans = []
        for each in recordings:
            if each.last and each.first:
                since = before.get(each.header.rank)
                # A rank writes its totals once a second, so there may be none newer than `since`.
                is_new = since is not None and since[Total.TIME_NS] < each.last[Total.TIME_NS]
                self._spans.append(span_of(each, since if since is not None and is_new else each.first))
        self._looks.append(now)
        newest_ns = _newest_ns(now)
        while len(self._looks) > 1 and newest_ns - _newest_ns(self._looks[1]) >= self._SPAN_NS:
            self._looks.popleft()

    @property
    def spans(self) -> Mapping[int, Span]:
        return {span.rank: span for span in self._spans}

    def of(self, rank: int) -> Cause | None:
        able = [span for span in self._spans if span.passes and span.grown.get(Total.TIME_NS)]
        span = next((each for each in able if each.rank == rank), None)
        others = [each for each in able if each.rank != rank]
        if span is None or not others:
            return None
        more_ns = _more(span, others, Total.WORKED_NS)
        return find_cause(span, others, more_ns) if more_ns > 0 else None


def _newest_ns(look: Mapping[int, Totals]) -> float:
    return max((totals.get(Total.TIME_NS, 0.0) for totals in look.values()), default=0.0)


class SlowWatch:
    """Reports which ranks of a running job have become slow, once for each rank and cause.

    The spans that it examines follow each other, and each is long enough for the limits.
    """

    def __init__(self, limits: Limits = WHILE_IT_RUNS) -> None:
        self._limits = limits
        self._since: dict[int, Totals] = {}
        self._reported: set[tuple[int, str]] = set()

    def look(self, recordings: Sequence[RankRecording]) -> list[str]:
        """The sentences about slow ranks that were not reported before."""
        now = {each.header.rank: each.last for each in recordings if each.last}
        spans = [
            span_of(each, self._since[each.header.rank])
            for each in recordings
            if each.last and each.header.rank in self._since
        ]
        if now.keys() - self._since.keys():  # another rank has begun: measure from now on
            self._since = now
            return []
        if not spans or any(
            span.passes < self._limits.passes
            or span.grown.get(Total.TIME_NS, 0.0) < self._limits.seconds * 1e9
            for span in spans
        ):
            return []
        self._since = now
        due = [
            slow
            for slow in slow_ranks(spans, self._limits)
            if (slow.span.rank, slow.cause.kind if slow.cause else "") not in self._reported
        ]
        self._reported |= {(slow.span.rank, slow.cause.kind if slow.cause else "") for slow in due}
        return [slow.sentence("the last ") for slow in due]
