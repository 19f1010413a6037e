"""Connects the output streams of ranks to the launcher, which reads them without ever blocking.

Each stream has a pipe or a pseudo-terminal to which no other rank writes.
"""

from __future__ import annotations

import array
import errno
import os
import pty
import termios
import time
import tty
from contextlib import suppress
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from paceline.launch.output import LineBuffer, Screen, TracebackKeeper

_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
_HELD_S = 10.0  # after a traceback; by then the rank has ended, or has caught the error, or hangs
_DRAINED_READS = 64  # more than a pipe holds: a grandchild that never stops writing must not block us


class RankLog:
    """A file with all output of one rank; a write error is reported once."""

    def __init__(self, path: Path, screen: Screen) -> None:
        self._path = path
        self._screen = screen
        self._is_reported = False
        self._fd: int | None = None
        # In a folder that others can write to, a link may lead to any of our files, and opening a pipe
        # without a reader would block.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            self._report(error)

    def write(self, data: bytes) -> None:
        if self._fd is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._screen.say(
                f"paceline: {self._path} cannot be written: {os.strerror(error.errno or 0)}. "
                "The job goes on, and this log is not complete"
            )


class OutputPipe:
    """One output stream of one rank: reads it, shows it, and keeps its end for the report."""

    def __init__(
        self, screen: Screen, fd: int, stream: int, prefix: bytes | None, log: RankLog | None, rank: int
    ) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_open = True
        self.is_error_output = stream == 2
        self.tail = b""  # the end of error output
        self.traceback_at: float | None = None  # when the last traceback in it began
        self._screen = screen
        self.stream = stream
        self._prefix = prefix
        self._log = log
        self._mark = b"[rank%d]: " % rank
        self._lines = LineBuffer()
        self._tracebacks = TracebackKeeper()

    def is_unread(self) -> bool:
        """Whether the rank has written something that was not read yet: it may be blocked by that."""
        unread = array.array("i", [0])
        return self.is_open and not ioctl(self.fd, termios.FIONREAD, unread) and unread[0] > 0

    def read(self) -> bool:
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # EIO: the last writer closed a pseudo-terminal
            data = b""
        if not data:
            self.is_open = False
            return False
        self._show(data)
        return True

    def drain(self) -> None:
        for _ in range(_DRAINED_READS):
            if not self.is_open or not self.read():
                return

    @property
    def is_raw(self) -> bool:
        return self._prefix is None

    def seconds_to_hold(self) -> float | None:
        since = self._tracebacks.held_since
        return None if since is None else max(0.0, since + _HELD_S - time.monotonic())

    def show_held(self) -> None:
        if self._prefix is not None:
            self._screen.write_lines(self.stream, self._prefix, self._tracebacks.flush())

    def take_held(self) -> bool:
        if self._tracebacks.held_since is None:
            return False
        self._lines.flush()
        self._tracebacks.flush()
        return True

    def close(self) -> None:
        """Show an unfinished last line, and close the descriptor; further calls do nothing.

        A traceback that is held back stays so: the stream may end before the rank does.
        """
        if self.fd < 0:
            return
        if self._prefix is not None:
            self._show_lines(self._lines.flush())
        os.close(self.fd)
        self.is_open, self.fd = False, -1

    def _show(self, data: bytes) -> None:
        if self._log is not None:
            self._log.write(data)
        if self.is_error_output:
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
            if b"Traceback (most recent call last)" in data:
                self.traceback_at = time.monotonic()
        if self._prefix is None:
            self._screen.write_raw(self.stream, data)
        else:
            self._show_lines([line.removeprefix(self._mark) for line in self._lines.feed(data)])

    def _show_lines(self, lines: list[bytes]) -> None:
        assert self._prefix is not None
        shown = self._tracebacks.feed(lines) if self.is_error_output else lines
        self._screen.write_lines(self.stream, self._prefix, shown)


@dataclass
class OutputPipes:
    stdout: int
    stderr: int
    pipes: list[OutputPipe]
    pty_master: int | None = None  # if rank 0 sees a terminal

    def close_rank_ends(self) -> None:
        """Call this once the rank has its copies; otherwise the streams would never end."""
        os.close(self.stdout)
        os.close(self.stderr)


def connect(screen: Screen, rank: int, nprocs: int, prefix: str, log: RankLog | None) -> OutputPipes:
    """Open the streams of a rank.

    Output of the only rank, and of rank 0 on a terminal, is passed on unchanged, so that progress bars can
    draw themselves. They get a pseudo-terminal, so that they know that there is a terminal; one for both
    streams, to keep their order.
    """
    fds: dict[int, int] = {}
    pipes: dict[int, OutputPipe] = {}
    master = None
    for stream in (1, 2):
        is_raw = prefix != "always" and (nprocs == 1 or (rank == 0 and screen.is_terminal(stream)))
        if is_raw and screen.is_terminal(stream) and master is not None:
            fds[stream] = os.dup(fds[1])
            pipes[1].is_error_output = True
            continue
        if is_raw and screen.is_terminal(stream):
            reader, fds[stream] = pty.openpty()
            tty.setraw(fds[stream])  # the real terminal turns \n into \r\n, once
            master = reader
        else:
            reader, fds[stream] = os.pipe()
        text = None if is_raw else b"" if prefix == "never" else screen.prefix(rank, stream)
        pipes[stream] = OutputPipe(screen, reader, stream, text, log, rank)
    outputs = OutputPipes(fds[1], fds[2], list(pipes.values()), master)
    copy_window_size(outputs)
    return outputs


def copy_window_size(outputs: OutputPipes) -> None:
    if outputs.pty_master is None:
        return
    for stream in (1, 2):
        with suppress(OSError):  # that stream is not the terminal
            size = ioctl(stream, termios.TIOCGWINSZ, bytes(8))
            ioctl(outputs.pty_master, termios.TIOCSWINSZ, size)
            return
