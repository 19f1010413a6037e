"""Writes timelines in Chrome's trace event format, which Perfetto (ui.perfetto.dev) reads.

Each host is a process of the trace, and each rank is a thread (one for each model, if there are several). An
arrow leads from the rank that arrived last to each rank that waited for it. Times are in microseconds since
the first slice. Pure, except for `check` and `write`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.trace.clocks import on_one_clock
from paceline.trace.ring_file import RankRecording
from paceline.trace.timeline import BackwardKey, RankTimeline, last_to_arrive, make_timeline

_LANES_PER_RANK = 100


def trace_events(recordings: Sequence[RankRecording]) -> dict[str, Any]:
    lines = on_one_clock([make_timeline(recording) for recording in recordings])
    starts = [each.begin_ns for line in lines for each in line.slices]
    events = list(_Writer(lines, min(starts, default=0)).events())
    lost = {f"rank {each.header.rank}": each.num_lost for each in recordings if each.num_lost}
    facts = {"recorded by": "Paceline", "records that were overwritten": lost}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def check(path: Path) -> None:
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from error


def write(path: Path, recordings: Sequence[RankRecording]) -> None:
    try:
        with path.open("w") as file:
            json.dump(trace_events(recordings), file)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"The trace can't be written to {path}.",
        seen=error.strerror or str(error),
        hint="a file in a folder that exists and that you may write to: --trace out.json",
    )


class _Writer:
    def __init__(self, lines: Sequence[RankTimeline], start_ns: int) -> None:
        self._lines, self._start_ns = lines, start_ns
        boots = list(dict.fromkeys(line.recording.header.boot for line in lines))
        # Process ids start at 1, because viewers treat process 0 as the kernel.
        self._host_of = {line.rank: 1 + boots.index(line.recording.header.boot) for line in lines}

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            yield from self._names(line)
            for each in line.slices:
                yield self._event("X", line, each.lane, each.begin_ns, each.name, args=dict(each.args)) | {
                    "dur": each.took_ns / 1000
                }
            for time_ns, lane, bucket in line.posted:
                yield self._event("i", line, lane, time_ns, f"bucket {bucket} posted") | {"s": "t"}
        yield from self._arrows()

    def _names(self, line: RankTimeline) -> Iterator[dict[str, Any]]:
        header = line.recording.header
        host = self._host_of[line.rank]
        yield {"ph": "M", "name": "process_name", "pid": host, "args": {"name": header.host}}
        lanes = sorted({each.lane for each in line.slices} | {0})
        for lane in lanes:
            name = f"rank {line.rank}" + (f", model {lane}" if lane else "")
            thread = {"pid": host, "tid": self._thread(line, lane)}
            yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": name}}
            order = {"sort_index": thread["tid"]}
            yield {"ph": "M", "name": "thread_sort_index", **thread, "args": order}

    def _arrows(self) -> Iterator[dict[str, Any]]:
        by_rank = {line.rank: line for line in self._lines}
        number = 0
        for key, whom in sorted(last_to_arrive(self._lines).items()):
            came_ns = by_rank[whom].arrivals[key]
            for line in self._lines:
                went_on_ns = _went_on(line, key, came_ns)
                if line.rank == whom or went_on_ns is None:
                    continue
                number += 1
                arrow = {"cat": "waited for", "id": number}
                yield self._event("s", by_rank[whom], key[0], came_ns, "waited for") | arrow
                yield self._event("f", line, key[0], went_on_ns, "waited for") | arrow | {"bp": "e"}

    def _thread(self, line: RankTimeline, lane: int) -> int:
        return 1 + line.rank * _LANES_PER_RANK + min(lane, _LANES_PER_RANK - 1)

    def _event(
        self, phase: str, line: RankTimeline, lane: int, time_ns: int, name: str, **more: Any
    ) -> dict[str, Any]:
        return {
            "ph": phase,
            "name": name,
            "pid": self._host_of[line.rank],
            "tid": self._thread(line, lane),
            "ts": (time_ns - self._start_ns) / 1000,
            **more,
        }


def _went_on(line: RankTimeline, key: BackwardKey, came_ns: int) -> int | None:
    waits = [
        wait.end_ns for wait in line.waits if wait.key == key and wait.begin_ns <= came_ns <= wait.end_ns
    ]
    return min(waits, default=line.ends.get(key))
