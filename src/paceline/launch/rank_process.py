"""Starts the process of a rank: its command line, streams, CPUs and inherited descriptors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.process_tree import die_with_parent

WITHOUT_FOLDER = "import sys; sys.path[:1] = filter(None, sys.path[:1])"  # like `python -P` of 3.11 and newer


def interpreter() -> tuple[str, ...]:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    return (sys.executable, *flags, "-u")


def python_command(code: str) -> tuple[str, ...]:
    """A command line that runs `code` with this copy of the package.

    The current folder, which `python -c` searches first, is left out: a `pickle.py` there would be imported
    instead of the standard library's.
    """
    root = str(Path(__file__).resolve().parents[2])
    return (*interpreter(), "-c", f"{WITHOUT_FOLDER}; sys.path.append({root!r}); {code}")


def open_missing_streams() -> None:
    """Open a standard input, output and error if this process was started without them (cron, `>&-`).

    Otherwise the next file that it opens gets the number 0, 1 or 2, and a rank would read the plan of the job
    as its input, or print into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # noqa: PERF203  # open() takes the lowest free number, which is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


@dataclass(frozen=True)
class Streams:
    """File descriptors for a rank's standard input, output and error; stdin may be `subprocess.DEVNULL`."""

    stdin: int
    stdout: int
    stderr: int

    def take(self) -> None:
        stdin = os.open(os.devnull, os.O_RDONLY) if self.stdin == subprocess.DEVNULL else self.stdin
        for fd, place in ((stdin, 0), (self.stdout, 1), (self.stderr, 2)):
            if fd != place:
                os.dup2(fd, place)
        if self.stdin == subprocess.DEVNULL:
            os.close(stdin)


@dataclass(frozen=True)
class RankStart:
    environment: Mapping[str, str]
    streams: Streams
    cores: frozenset[int] | None
    process_group: int
    inherited_fds: tuple[int, ...] = ()

    def all_fds(self) -> set[int]:
        fds = {self.streams.stdin, self.streams.stdout, self.streams.stderr, *self.inherited_fds}
        return {fd for fd in fds if fd > 2}

    def prepare(self, parent: int) -> None:
        die_with_parent(parent, signal.SIGKILL)
        os.setpgid(0, self.process_group)
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        if self.cores is not None:
            with suppress(OSError):  # a core has gone offline since: slower, not wrong
                os.sched_setaffinity(0, self.cores)


@dataclass
class ForkedRank:
    """A rank that another process has started for us; has the parts of `Popen` that are needed."""

    pid: int
    returncode: int | None = None


def start_rank(command: Iterable[str], start: RankStart) -> subprocess.Popen[bytes]:
    """Start one rank. Call it from the main thread of a process that has no other threads."""
    parent = os.getpid()
    return subprocess.Popen(
        list(command),
        env=dict(start.environment),
        stdin=start.streams.stdin,
        stdout=start.streams.stdout,
        stderr=start.streams.stderr,
        pass_fds=start.inherited_fds,
        preexec_fn=lambda: start.prepare(parent),
    )
