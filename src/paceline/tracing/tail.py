"""What a rank that runs has recorded since the last look, read out of its file while it writes.

The one idea: the reader copies the records that are new out of the file that the rank has mapped; the rank
does not notice. What may have been overwritten during the copy is left out. The reader maps nothing: a file
that becomes shorter would end it by a signal. Imports its neighbours and the standard library.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.tracing.records import RECORD_BYTES, Event, Record, unpack_run
from paceline.tracing.ring_file import (
    COUNT_AT,
    NOTES_AT,
    NOTES_USED_AT,
    RECORDS_AT,
    RankHeader,
    check_records,
    check_size,
    damaged,
    file_bytes,
    notes_end,
    open_regular,
    read_header,
    read_notes,
)

WINDOW_NS = 10_000_000_000
"""How far back a window reaches at least, if the ring does."""
_FEWEST_PASSES = 5  # of a slow model, it reaches back farther
MOST_RECORDS = 4096
"""How many records a look takes at most, the newest: a small model makes thousands in a second, and who looks
must not take the processor from the ranks."""
_MARGIN = 64  # records that a rank may write while we copy: several threads, one at a time each


class RingTail:
    """Follows the file of one rank.

    Args:
        path: The file. It may be replaced by another one, when the rank begins again.

    Attributes:
        header: Who records; None: nobody yet.
        records: The window: the newest records, oldest first, and before them the last one of each value
            that is noted now and then.
        notes: All that was told in words.
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
        """Read what is new; a file that is gone or not whole yet changes nothing.

        Raises:
            ConfigError: The file is damaged.
        """
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
        safe = (
            self._number_at(COUNT_AT) + _MARGIN - capacity
        )  # what lies before it may have been written over
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
        window.sort(key=lambda record: record.time_ns)  # nearly sorted already: threads write side by side
        self.records = _cut(window, self._last_values)


def _cut(window: list[Record], kept: dict[tuple[int, int], Record]) -> list[Record]:
    """The end of a window: some time, some passes; and what is kept in any case."""
    if not window:
        return window
    from_ns = window[-1].time_ns - WINDOW_NS
    ends = [record.time_ns for record in window if record.event == Event.PASS_ENDED]
    if len(ends) > _FEWEST_PASSES:
        from_ns = min(from_ns, ends[-_FEWEST_PASSES - 1])
        if len(window) > 2 * MOST_RECORDS:
            from_ns = max(from_ns, window[-2 * MOST_RECORDS].time_ns)
        place = next(i for i, record in enumerate(window) if record.time_ns >= from_ns)
    else:
        place = max(0, len(window) - 2 * MOST_RECORDS)
    older = [record for record in kept.values() if record.time_ns < window[place].time_ns]
    return [*sorted(older, key=lambda record: record.time_ns), *window[place:]]
