"""A table of the last backward passes of all ranks, and what each rank was doing last, as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.trace.clocks import on_one_clock
from paceline.trace.ring_file import RankRecording
from paceline.trace.timeline import BackwardKey, RankTimeline, Slice, last_to_arrive, make_timeline

_COLUMNS = ("data", "forward", "backward", "average", "optimizer")


def render(recordings: Sequence[RankRecording], num_backwards: int) -> str:
    """A table of the last backward passes with a row for each rank, in milliseconds; then a line per rank."""
    lines = on_one_clock([make_timeline(recording) for recording in recordings])
    last = last_to_arrive(lines)
    rows: list[tuple[str, ...]] = [("iteration", "rank", *_COLUMNS, "waited", "for")]
    models = {lane for line in lines for lane, _ in line.arrivals}
    for key in _last_keys(lines, num_backwards):
        number = f"{key[1]}" if len(models) <= 1 else f"{key[1]} of model {key[0]}"
        rows += [(number, str(line.rank), *_cells(line, key, last.get(key))) for line in lines]
    end_ns = max((record.time_ns for line in lines for record in line.recording.records[-1:]), default=0)
    reported = [_last_words(line, end_ns) for line in lines]
    return "\n".join([*_table(rows), "", "milliseconds; waited: until the last rank came", "", *reported])


def _last_keys(lines: Sequence[RankTimeline], num_backwards: int) -> list[BackwardKey]:
    keys = {
        _key_of(each)
        for line in lines
        for each in line.slices
        if each.name in _COLUMNS and "iteration" in each.args
    }
    chosen: list[BackwardKey] = []
    for lane in sorted({lane for lane, _ in keys}):
        chosen += sorted(key for key in keys if key[0] == lane)[-num_backwards:]
    return chosen


def _key_of(each: Slice) -> BackwardKey:
    return each.lane, each.args["iteration"]


def _cells(line: RankTimeline, key: BackwardKey, whom: int | None) -> list[str]:
    own = [each for each in line.slices if each.name in _COLUMNS and each.args.get("iteration") == key[1]]
    own = [each for each in own if each.lane == key[0]]
    begin_ns = min((each.begin_ns for each in own), default=0)
    before_ns = max((end for (lane, n), end in line.ends.items() if lane == key[0] and n < key[1]), default=0)
    # Work outside of a backward counts for the next backward, but the optimizer for the previous one.
    end_ns = min(
        (
            s.begin_ns
            for s in line.slices
            if s.begin_ns > line.ends.get(key, 1 << 62) and s.name in ("forward", "data")
        ),
        default=1 << 62,
    )
    cells = []
    for name in _COLUMNS:
        if name == "data":
            parts = [s for s in line.slices if s.name == name and before_ns <= s.begin_ns <= begin_ns]
        elif name == "optimizer":
            after_ns = line.ends.get(key, 1 << 62)
            parts = [s for s in line.slices if s.name == name and after_ns <= s.begin_ns < end_ns]
        else:
            parts = [s for s in own if s.name == name]
        text = f"{sum(part.took_ns for part in parts) / 1e6:.1f}" if parts else ""
        cells.append(text + ("..." if any(part.args.get("unfinished") for part in parts) else ""))
    waited_ns = sum(wait.end_ns - wait.begin_ns for wait in line.waits if wait.key == key)
    if not waited_ns:
        return [*cells, "", ""]
    return [*cells, f"{waited_ns / 1e6:.1f}", "" if whom in (None, line.rank) else f"rank {whom}"]


def _last_words(line: RankTimeline, end_ns: int) -> str:
    header, records = line.recording.header, line.recording.records
    who = f"rank {header.rank} (pid {header.pid})"
    failures = [note["text"] for note in line.recording.notes if note.get("what") == "failure"]
    reported = "".join(f"\n  {text.splitlines()[0]}" for text in failures[-1:])
    if not records:
        return f"{who}: has recorded nothing{reported}"
    ago = f"{(end_ns - records[-1].time_ns) / 1e9:.3f} s before the last record of the job"
    unfinished = [each for each in line.slices if each.args.get("unfinished")]
    if not unfinished:
        return f"{who}: between two backward passes, {ago}{reported}"
    each = unfinished[-1]
    where = f" of iteration {each.args['iteration']}" if "iteration" in each.args else ""
    posted = sum(1 for time_ns, lane, _ in line.posted if lane == each.lane and time_ns >= each.begin_ns)
    buckets = f", {posted} buckets posted" if each.name == "backward" else ""
    return f"{who}: in {each.name}{where}{buckets}, {ago}{reported}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
