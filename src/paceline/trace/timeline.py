"""Turns the records of a rank into a timeline: slices of time, and waits for other ranks.

Records hold the times at which activities began and ended. How activities nest follows from these times.
Slices of one lane never overlap in part, so that viewers can nest them. A lane is the number of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.trace.records import Event, Record, backward_of
from paceline.trace.ring_file import RankRecording

BackwardKey = tuple[int, int]
"""A model and the number of one of its backward passes."""

_BEGINS = {
    Event.FORWARD_BEGAN: "forward",
    Event.BACKWARD_BEGAN: "backward",
    Event.BACKWARD_ENDED: "average",
    Event.LOCAL_BACKWARD_BEGAN: "backward",
    Event.OPTIMIZER_BEGAN: "optimizer",
    Event.DATA_BEGAN: "data",
}
_ENDS = {
    Event.FORWARD_ENDED: "forward",
    Event.BACKWARD_ENDED: "backward",
    Event.LOCAL_BACKWARD_ENDED: "backward",
    Event.AVERAGING_ENDED: "average",
    Event.OPTIMIZER_ENDED: "optimizer",
    Event.DATA_ENDED: "data",
}
_OF_A_BACKWARD = {"forward", "backward", "average"}


@dataclass(frozen=True)
class Slice:
    name: str
    begin_ns: int
    end_ns: int
    lane: int
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Wait:
    """`whom` is the last rank to arrive, as far as this rank knows."""

    key: BackwardKey
    begin_ns: int
    end_ns: int
    whom: int | None


@dataclass
class RankTimeline:
    """What one rank did.

    Attributes:
        recording: The recording that this was made from.
        slices: Sorted by lane and begin, and properly nested within each lane.
        posted: The time, the lane and the bucket of each post.
        arrivals: When autograd had finished each backward.
        ends: When each backward was over, averaging included.
        failed: Backward passes that raised on this rank.
        waits: Its waits for other ranks.
    """

    recording: RankRecording
    slices: list[Slice] = field(default_factory=list)
    posted: list[tuple[int, int, int]] = field(default_factory=list)
    arrivals: dict[BackwardKey, int] = field(default_factory=dict)
    ends: dict[BackwardKey, int] = field(default_factory=dict)
    failed: set[BackwardKey] = field(default_factory=set)
    waits: list[Wait] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.recording.header.rank

    def shifted(self, by_ns: int) -> RankTimeline:
        if not by_ns:
            return self
        return RankTimeline(
            self.recording,
            [replace(s, begin_ns=s.begin_ns + by_ns, end_ns=s.end_ns + by_ns) for s in self.slices],
            [(time_ns + by_ns, *rest) for time_ns, *rest in self.posted],  # type: ignore[misc]
            {key: time_ns + by_ns for key, time_ns in self.arrivals.items()},
            {key: time_ns + by_ns for key, time_ns in self.ends.items()},
            self.failed,
            [replace(w, begin_ns=w.begin_ns + by_ns, end_ns=w.end_ns + by_ns) for w in self.waits],
        )


def make_timeline(recording: RankRecording) -> RankTimeline:
    return _Builder(recording).build()


def last_to_arrive(timelines: Sequence[RankTimeline]) -> dict[BackwardKey, int]:
    """The rank that arrived last in each backward that all ranks have recorded."""
    shared = set.intersection(*(set(each.arrivals) for each in timelines)) if timelines else set()
    return {key: max(timelines, key=lambda each: each.arrivals[key]).rank for key in shared}


class _Builder:
    def __init__(self, recording: RankRecording) -> None:
        self._line = RankTimeline(recording)
        self._found: list[Slice] = []
        self._open: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}
        self._current: BackwardKey = (0, 0)
        self._marks: dict[int, int] = {}  # of each lane, when the last part of the end of a backward was over
        self._buckets: dict[int, list[list[Any]]] = {
            note["model"]: note["buckets"] for note in recording.notes if note.get("what") == "buckets"
        }

    def build(self) -> RankTimeline:
        records = sorted(self._line.recording.records, key=lambda record: record.time_ns)
        for record in records:
            self._take(record)
        if records:
            for name, lane in list(self._open):
                self._close(name, lane, records[-1].time_ns, {"unfinished": True})
        self._line.slices = nested(self._found)
        return self._line

    def _take(self, record: Record) -> None:
        event = record.event
        if event in (Event.POSTED, Event.REDUCED, Event.WAITED, Event.COPIED_BACK):
            self._take_of_core(record)
            return
        if event in (Event.WROTE_BACK, Event.SYNCED_BUFFERS):
            lane, _ = self._current
            begin_ns = self._marks.get(lane, record.time_ns)
            self._add("write back" if event == Event.WROTE_BACK else "buffers", begin_ns, record.time_ns)
            return
        name = _ENDS.get(event)  # type: ignore[call-overload]
        if name is not None:
            lane = self._lane(name, record)
            is_end = event in (Event.AVERAGING_ENDED, Event.LOCAL_BACKWARD_ENDED)
            more = {"raised": True} if is_end and record.second else {}
            self._close(name, lane, record.time_ns, more)
        if event == Event.BACKWARD_ENDED:
            self._current = backward_of(record.first)
            self._line.arrivals[self._current] = self._marks[self._current[0]] = record.time_ns
        elif event == Event.AVERAGING_ENDED:
            key = backward_of(record.first)
            self._line.ends[key] = record.time_ns
            if record.second:
                self._line.failed.add(key)
                self._close("backward", key[0], record.time_ns, {"raised": True})
        name = _BEGINS.get(event)  # type: ignore[call-overload]
        if name is not None:
            lane = self._lane(name, record)
            self._close(name, lane, record.time_ns, {})  # left open by a forward that raised
            self._open[name, lane] = record.time_ns, self._args(event, record)
            if event == Event.BACKWARD_BEGAN:
                self._current = backward_of(record.first)

    @staticmethod
    def _lane(name: str, record: Record) -> int:
        return backward_of(record.first)[0] if name in _OF_A_BACKWARD else 0

    @staticmethod
    def _args(event: int, record: Record) -> dict[str, Any]:
        if event in (Event.OPTIMIZER_BEGAN, Event.DATA_BEGAN):
            return {}
        args: dict[str, Any] = {"iteration": backward_of(record.first)[1]}
        is_local_forward = event == Event.FORWARD_BEGAN and not record.second & 1
        if is_local_forward or event == Event.LOCAL_BACKWARD_BEGAN:
            args["no_sync"] = True
        if event == Event.BACKWARD_ENDED and record.second:
            args["without data"] = True
        return args

    def _take_of_core(self, record: Record) -> None:
        lane, number = self._current
        if record.event == Event.POSTED:
            self._line.posted.append((record.time_ns, lane, record.first))
            return
        if record.event == Event.REDUCED:
            bucket, chunks = record.second >> 32, record.second & 0xFFFFFFFF
            args = {"chunks": chunks, **self._of_bucket(lane, bucket)}
            self._add(f"reduce bucket {bucket}", record.first, record.time_ns, args)
        elif record.event == Event.COPIED_BACK:
            self._add("copy back", record.first, record.time_ns)
        else:
            whom = record.second if record.second >= 0 else None
            self._line.waits.append(Wait(self._current, record.first, record.time_ns, whom))
            name = "wait" if whom is None else f"wait for rank {whom}"
            self._add(name, record.first, record.time_ns, {"iteration": number})
        self._marks[lane] = max(self._marks.get(lane, 0), record.time_ns)

    def _of_bucket(self, lane: int, bucket: int) -> dict[str, Any]:
        known = self._buckets.get(lane, [])
        return {"bytes": known[bucket][0], "gradients": known[bucket][1]} if 0 <= bucket < len(known) else {}

    def _add(self, name: str, begin_ns: int, end_ns: int, args: Mapping[str, Any] | None = None) -> None:
        lane, _ = self._current
        if end_ns > begin_ns:
            self._found.append(Slice(name, begin_ns, end_ns, lane, args or {}))
        self._marks[lane] = max(self._marks.get(lane, 0), end_ns)

    def _close(self, name: str, lane: int, end_ns: int, more: Mapping[str, Any]) -> None:
        begun = self._open.pop((name, lane), None)
        if begun is not None:
            self._found.append(Slice(name, begun[0], end_ns, lane, {**begun[1], **more}))


def nested(slices: Iterable[Slice]) -> list[Slice]:
    """Sort slices by lane and begin, and cut each at the end of the slice in which it begins."""
    found: list[Slice] = []
    stack: list[Slice] = []
    for each in sorted(slices, key=lambda s: (s.lane, s.begin_ns, -s.end_ns)):
        while stack and (stack[-1].lane != each.lane or stack[-1].end_ns <= each.begin_ns):
            stack.pop()
        inner = replace(each, end_ns=min(each.end_ns, stack[-1].end_ns)) if stack else each
        stack.append(inner)
        found.append(inner)
    return found
