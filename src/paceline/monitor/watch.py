"""Watches a running job from another process, through its folder, its ranks' files, and /proc."""

from __future__ import annotations

import math
import os
import struct
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.monitor.snapshot import JobSnapshot, RankWindow, snapshot
from paceline.trace import jobs
from paceline.trace.jobs import JobFacts
from paceline.trace.records import RECORD_BYTES, Event, Record, unpack_run
from paceline.trace.remote_ranks import remote_ranks
from paceline.trace.ring_file import (
    COUNT_AT,
    NOTES_AT,
    NOTES_USED_AT,
    RECORDS_AT,
    RankHeader,
    RankRecording,
    check_records,
    check_size,
    damaged,
    file_bytes,
    notes_end,
    open_regular,
    paths_in,
    printable,
    read_header,
    read_notes,
    read_start,
)
from paceline.trace.slow_ranks import CauseWatch
from paceline.trace.usage import resident_bytes

WINDOW_NS = 10_000_000_000
"""A window covers at least this time, if the ring does."""
_FEWEST_BACKWARDS = 5  # for a slow model, a window is longer, to contain this many
MOST_RECORDS = 4096
"""How many records a look reads at most; it reads the newest. A small model makes thousands of records in a
second, and the watcher must not take processor time from the ranks."""
_MARGIN = 64  # records that the threads of a rank may write during a copy, one at a time each
_PSS_EVERY_S = 10.0  # seldom, because the kernel walks through all pages of the rank for it


class JobWatch:
    """Follows one job; each `look` returns a new snapshot of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: JobFacts | None = jobs.facts_of(folder)
        self._tails: dict[Path, RingTail] = {}
        self._causes = CauseWatch()
        self._memory: dict[int, tuple[float, int]] = {}  # of each process: when to read its PSS again, and it

    @property
    def id(self) -> str:
        """The id under which `paceline trace` lists the job."""
        return printable(self.folder.name)

    @property
    def is_gone(self) -> bool:
        facts = self.facts
        return not self.folder.exists() and (facts is None or facts.is_running)

    @property
    def has_ended(self) -> bool:
        if self.facts is None:
            return bool(self._tails) and not any(
                _is_alive(tail.header.pid) for tail in self._tails.values() if tail.header is not None
            )
        facts = jobs.facts_of(self.folder)
        return facts is None or not facts.is_running

    def look(self) -> JobSnapshot:
        for path in paths_in(self.folder):
            if path not in self._tails:
                self._tails[path] = RingTail(path)
        windows = []
        for tail in self._tails.values():
            tail.look()
            if tail.header is not None:
                windows.append(self._window(tail))
        here = {each.header.rank for each in windows}
        remote = [each for each in remote_ranks(self.folder) if each.recording.header.rank not in here]
        self._causes.look([*self._totals(), *(each.recording for each in remote)])
        windows.sort(key=lambda each: each.header.rank)
        now = snapshot(windows, time.monotonic_ns(), remote, self._causes.spans)
        cause = None if now.slow_rank is None else self._causes.of(now.slow_rank)
        return now if cause is None else replace(now, cause=cause.text)

    def _totals(self) -> list[RankRecording]:
        found = []
        for path, tail in self._tails.items():
            with suppress(OSError):
                start = read_start(path)
                if start is not None and tail.header is not None and start.header.pid == tail.header.pid:
                    found.append(start)
        return found

    def _window(self, tail: RingTail) -> RankWindow:
        header = tail.header
        assert header is not None
        memory, is_shared = self._memory_of(header.pid)
        return RankWindow(
            header=header,
            records=tail.records,
            names={note["number"]: note["name"] for note in tail.notes if note.get("what") == "value"},
            failures=[
                (note["time_ns"], note["text"]) for note in tail.notes if note.get("what") == "failure"
            ],
            is_alive=_is_alive(header.pid),
            memory_bytes=memory,
            is_memory_shared=is_shared,
        )

    def _memory_of(self, pid: int) -> tuple[int | None, bool]:
        when_s, pss = self._memory.get(pid, (0.0, 0))
        if time.monotonic() >= when_s:
            pss = _read_pss(pid)
            self._memory[pid] = time.monotonic() + _PSS_EVERY_S, pss
        if pss:
            return pss, False
        return resident_bytes(pid), True


def as_plain(watch: JobWatch, now: JobSnapshot) -> dict[str, Any]:
    facts = watch.facts
    reported = {
        "job": watch.id,
        "name": "" if facts is None else facts.name,
        "started_s": None if facts is None else facts.started_s,
        "is_running": not watch.has_ended,
    }
    found: dict[str, Any] = plain({**reported, **asdict(now)})
    return found


def find_running(name: str | None) -> Path:
    if name is not None:
        folder = jobs.find(name)
        try:
            os.listdir(folder)
        except OSError as error:
            raise ConfigError(
                f"What the job records can't be read: {folder}.",
                seen=error.strerror or str(error),
                likely="it is another user's" if isinstance(error, PermissionError) else "",
            ) from error
        facts = jobs.facts_of(folder)
        if facts is not None and not facts.is_running:
            raise ConfigError(
                f"Job {folder.name} ({facts.name}) has ended: {facts.state}.",
                hint=f"`paceline trace {folder.name}` shows its last backward passes",
            )
        return folder
    running = [(folder, facts) for folder, facts in jobs.jobs() if facts.is_running]
    if not running:
        raise ConfigError(
            "No job of yours is running.",
            where=str(jobs.users_folder()),
            seen=jobs.squatter() or jobs.folders_of_others(),
            likely="it was started by another launcher than `paceline run` or spawn, or with another TMPDIR",
            hint="of another launcher: set PACELINE_TRACE_DIR to a folder for it, and name the folder here",
        )
    if len(running) > 1:
        raise ConfigError(
            f"{len(running)} jobs of yours are running; name one of them.",
            seen=", ".join(
                f"{folder.name} ({facts.name}, {facts.nprocs} ranks)" for folder, facts in running
            ),
        )
    return running[0][0]


def _is_alive(pid: int) -> bool:
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def _read_pss(pid: int) -> int:
    """0 if it is unknown."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class RingTail:
    """Follows the file of one rank while the rank writes it.

    Each look copies the new records from the file, without slowing the rank down. Records that may have been
    overwritten during the copy are left out. The file is read and not mapped, because access to a mapped file
    that was truncated would kill this process with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        self.header: RankHeader | None = None
        self.records: list[Record] = []
        self.notes: list[dict[str, Any]] = []
        self._path = path
        self._fd, self._inode = -1, 0
        self._close: Callable[[], object] = lambda: None
        self._next, self._notes_read = 0, 0
        self._last_values: dict[tuple[int, int], Record] = {}

    def look(self) -> None:
        try:
            self._look()
        except ValueError as error:
            raise damaged(self._path, error) from error

    def _look(self) -> None:
        if not self._open():
            return
        assert self.header is not None
        self._read_notes()
        capacity = self.header.capacity
        count = self._number_at(COUNT_AT)
        if count <= self._next:
            return
        first = max(self._next, count - capacity, count - MOST_RECORDS)
        copied = self._copy(first, count, capacity)
        self._next = count
        # Records before this one may have been overwritten during the copy.
        safe = self._number_at(COUNT_AT) + _MARGIN - capacity
        lost = max(0, safe - first)
        self._take(unpack_run(copied[lost * RECORD_BYTES :], first + lost, count))

    def _open(self) -> bool:
        try:
            inode = os.stat(self._path).st_ino
            if inode == self._inode:
                return True
            fd = open_regular(self._path)
        except OSError:
            return False
        close = weakref.finalize(self, os.close, fd)
        header = read_header(os.pread(fd, COUNT_AT, 0))
        if header is None:
            close()
            return False
        check_size(header, os.fstat(fd).st_size)
        if self.header is not None and self.header.pid != header.pid:
            self.records, self._last_values = [], {}
        self._fd, self.header, self._inode = fd, header, inode
        self._close()
        self._close = close
        self._next = self._notes_read = 0
        self.notes = []
        return True

    def _read(self, begin: int, end: int) -> bytes:
        found = os.pread(self._fd, end - begin, begin)
        if len(found) < end - begin:
            raise ValueError(f"it has become shorter than {end} bytes")
        return found

    def _number_at(self, place: int) -> int:
        return int(struct.unpack("<Q", self._read(place, place + 8))[0])

    def _read_notes(self) -> None:
        used = self._number_at(NOTES_USED_AT)
        if used > self._notes_read:
            self.notes += read_notes(self._read(NOTES_AT + self._notes_read, notes_end(used)))
            self._notes_read = used

    def _copy(self, first: int, end: int, capacity: int) -> bytes:
        begin, stop = (RECORDS_AT + index % capacity * RECORD_BYTES for index in (first, end))
        if first % capacity < end % capacity:
            return self._read(begin, stop)
        return self._read(begin, file_bytes(capacity)) + self._read(RECORDS_AT, stop)

    def _take(self, found: list[Record]) -> None:
        check_records(found)
        for record in found:
            if record.event == Event.LOGGED:
                self._last_values[record.event, record.first] = record
            elif record.event == Event.NORM:
                self._last_values[record.event, 0] = record
        window = [*self.records, *found]
        window.sort(key=lambda record: record.time_ns)  # nearly sorted already: several threads write records
        self.records = _cut(window, self._last_values)


def _cut(window: list[Record], kept: dict[tuple[int, int], Record]) -> list[Record]:
    if not window:
        return window
    from_ns = window[-1].time_ns - WINDOW_NS
    ends = [record.time_ns for record in window if record.event == Event.AVERAGING_ENDED]
    if len(ends) > _FEWEST_BACKWARDS:
        from_ns = min(from_ns, ends[-_FEWEST_BACKWARDS - 1])
        if len(window) > 2 * MOST_RECORDS:
            from_ns = max(from_ns, window[-2 * MOST_RECORDS].time_ns)
        place = next(i for i, record in enumerate(window) if record.time_ns >= from_ns)
    else:
        place = max(0, len(window) - 2 * MOST_RECORDS)
    older = [record for record in kept.values() if record.time_ns < window[place].time_ns]
    return [*sorted(older, key=lambda record: record.time_ns), *window[place:]]
