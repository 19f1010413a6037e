"""Output of several ranks on one terminal or file: whole lines, each with its rank, and one progress bar.

A line of one rank never interrupts a line of another. Rank 0 on a terminal is an exception, so that progress
bars work: its bytes are passed on unchanged, and lines of other ranks are put above its unfinished line. The
launcher never waits for the reader of its output while the job runs.
"""

from __future__ import annotations

import errno
import os
import re
import select
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

_READ_WITHIN_S = 1.0
_UNREAD_S = 10.0
_LONGEST_LINE = 1 << 20
_LONGEST_TRACEBACK = 1000  # lines; Python shortens that of a RecursionError itself
_LONGEST_REDRAWN = 1 << 14
# How rich, tqdm and others move back to the top of several rows that they redraw.
_REDRAW = re.compile(rb"\r?(?:\x1b\[2K)?(?:\x1b\[1A(?:\x1b\[2K)?)+")
_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class LineBuffer:
    """Splits bytes into lines as a terminal would finally show them.

    For a progress bar that redraws itself with carriage returns, the line is its last state.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        self._pending = _last_drawn(self._pending)
        if len(self._pending) > _LONGEST_LINE:
            lines.append(self._pending)
            self._pending = b""
        return [_last_drawn(line).rstrip(b"\r") for line in lines]

    def flush(self) -> list[bytes]:
        line, self._pending = self._pending.rstrip(b"\r"), b""
        return [line] if line else []


class TracebackKeeper:
    """Holds back a traceback and what comes after it, because the launcher's report may show it instead.

    Ranks often raise the same error at the same moment. Only when a rank has ended is it known whether a
    traceback ended it, or was logged and survived.
    """

    def __init__(self) -> None:
        self.held_since: float | None = None
        """When the first held line arrived, by time.monotonic()."""
        self._held: list[bytes] = []

    def feed(self, lines: Sequence[bytes]) -> list[bytes]:
        if self._held:
            self._held += lines
            return self.flush() if len(self._held) > _LONGEST_TRACEBACK else []
        for index, line in enumerate(lines):
            if line.startswith(b"Traceback (most recent call last):"):
                self._held, self.held_since = list(lines[index:]), time.monotonic()
                return list(lines[:index])
        return list(lines)

    def flush(self) -> list[bytes]:
        held, self._held, self.held_since = self._held, [], None
        return held


def _last_drawn(line: bytes) -> bytes:
    """What is visible after the carriage returns in `line`; a final carriage return is kept."""
    if b"\r" not in line:
        return line
    end = b"\r" if line.endswith(b"\r") else b""
    drawn = [part for part in line.split(b"\r") if part]
    return drawn[-1] + end if drawn else end


def say(text: str) -> None:
    """Write to standard error, unless the disk is full or no process reads it: no job may wait for that."""
    with suppress(OSError):
        if _is_writable(2, _READ_WITHIN_S):
            os.write(2, text.encode(errors="replace") + b"\n")


class Screen:
    """The launcher's standard output and error; nothing else writes to them while the job runs.

    Output that a reader does not accept yet is kept, and written by `write_kept`.
    """

    def __init__(self, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._fds = {1: stdout_fd, 2: stderr_fd}
        self._kept: dict[int, deque[bytes]] = {1: deque(), 2: deque()}
        if _is_same_file(stdout_fd, stderr_fd):
            self._kept[2] = self._kept[1]
        self._read_at = 0.0  # when standard output accepted something, or nothing was kept for it
        self._is_unread_reported = False
        self._is_terminal = {stream: _is_terminal(fd) for stream, fd in self._fds.items()}
        self._has_colour = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._drawn = b""  # rank 0's unfinished last line, or the rows that it redraws together
        self._rows_above = 0  # how many of those rows are above the last one
        self.has_lost_reader = False  # no process reads our standard output any more
        self.has_shown_anything = False
        self._failed: set[int] = set()  # streams with a write error that was reported

    def is_terminal(self, stream: int) -> bool:
        return self._is_terminal[stream]

    def prefix(self, rank: int, stream: int) -> bytes:
        if self._is_terminal[stream] and self._has_colour:
            return b"\x1b[%dm[rank %d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)
        return b"[rank %d] " % rank

    def write_lines(self, stream: int, prefix: bytes, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        text = b"".join(prefix + line + b"\n" for line in lines)
        if self._drawn and self._is_terminal[stream]:
            erased = b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * self._drawn.count(b"\n")
            text = erased + text + self._drawn
        self._write(stream, text)

    def write_raw(self, stream: int, data: bytes) -> None:
        self._write(stream, data)
        if not self._is_terminal[stream]:
            return
        drawn = self._drawn + data
        for redraw in _REDRAW.finditer(drawn):
            self._rows_above = redraw.group().count(b"\x1b[1A")
        rows = _REDRAW.split(drawn)[-1].split(b"\n")
        if len(rows) > self._rows_above + 1:  # it has stopped redrawing, or redraws more rows
            rows, self._rows_above = rows[-1:], 0
        if b"\r" in rows[-1]:
            rows[-1] = b"\r" + _last_drawn(rows[-1])
        self._drawn = b"\n".join(rows)
        if len(self._drawn) > _LONGEST_REDRAWN:
            self._drawn = b""

    def say(self, text: str) -> None:
        if self._drawn and self._is_terminal[2]:
            self._write(2, b"\n")
            self._drawn = b""
        self._write(2, text.encode(errors="replace") + b"\n")

    def blocked(self) -> dict[int, int]:
        """The streams that wait for their reader, with their file descriptors."""
        return {stream: self._fds[stream] for stream, kept in self._kept.items() if kept}

    def seconds_to_report(self) -> float | None:
        """Seconds until `report_unread` has something to report; None: never, as far as is known."""
        if not self._kept[1] or self._kept[2] or self._is_unread_reported:
            return None
        return max(0.0, self._read_at + _UNREAD_S - time.monotonic())

    def report_unread(self) -> None:
        """Report once if standard output has not been read for long."""
        if self.seconds_to_report() == 0.0:
            self._is_unread_reported = True
            self.say(
                f"paceline: standard output has not been read for {_UNREAD_S:g} s. "
                "Ranks that write more wait until it is, and so does the end of the job"
            )

    def write_kept(self) -> None:
        """Write what was kept, as far as the readers accept it."""
        for stream in (1, 2):
            self._write_kept(stream)

    def _write(self, stream: int, data: bytes) -> None:
        self.has_shown_anything = True
        if stream == 1 and not self._kept[1]:
            self._read_at = time.monotonic()
        self._kept[stream].append(data)
        self._write_kept(stream)

    def _write_kept(self, stream: int) -> None:
        kept, fd = self._kept[stream], self._fds[stream]
        while kept:
            try:
                if not _is_writable(fd):
                    return
                # A pipe that is writable has room for this much.
                num_written = os.write(fd, memoryview(kept[0])[: select.PIPE_BUF])
            except BlockingIOError:  # another process made the shared pipe non-blocking
                return
            except OSError as error:  # keep reading the ranks, so that none blocks
                kept.clear()
                self._report(stream, error)
                return
            if stream == 1:
                self._read_at = time.monotonic()
            kept[0] = kept[0][num_written:]
            if not kept[0]:
                kept.popleft()

    def _report(self, stream: int, error: OSError) -> None:
        if error.errno == errno.EPIPE or self._is_terminal[stream]:
            self.has_lost_reader = self.has_lost_reader or stream == 1
        elif stream not in self._failed:
            self._failed.add(stream)
            if stream == 1:
                self.say(
                    f"paceline: standard output cannot be written: {os.strerror(error.errno or 0)}. "
                    "The job goes on; what the ranks print is lost as long as this lasts"
                )


def _is_writable(fd: int, within_s: float = 0.0) -> bool:
    """Whether a write would return at once, with success or an error."""
    writable = select.poll()
    writable.register(fd, select.POLLOUT)
    return bool(writable.poll(1000 * within_s))


def _is_same_file(first: int, second: int) -> bool:
    try:
        return os.path.samestat(os.fstat(first), os.fstat(second))
    except OSError:
        return False


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False
