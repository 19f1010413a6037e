"""What this process has used of the machine so far: processor time, and what kept it from running.

The one idea: totals since the process began, from files that stay open, so that a look costs microseconds.
What a machine does not tell is left out. Imports its neighbours and the standard library.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

from paceline.tracing.records import Usage


class UsageReader:
    """Reads the totals of this process."""

    def __init__(self) -> None:
        self._schedstat = _open("/proc/self/schedstat")
        self._stat = _open("/proc/stat")
        self._cgroup = next(
            (fd for fd in map(_open, _cpu_stat_paths()) if fd is not None and b"throttled_usec" in _read(fd)),
            None,
        )

    def read(self) -> dict[Usage, int]:
        """All totals that this machine tells."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        found = {
            Usage.CPU_NS: time.process_time_ns(),
            Usage.SWITCHES: used.ru_nivcsw,
            Usage.MAJOR_FAULTS: used.ru_majflt,
            Usage.MINOR_FAULTS: used.ru_minflt,
        }
        with contextlib.suppress(IndexError, ValueError):
            found[Usage.RUN_QUEUE_NS] = int(_read(self._schedstat).split()[1])
        with contextlib.suppress(IndexError, ValueError):
            found[Usage.STEAL_TICKS] = _steal_of(_read(self._stat), os.sched_getaffinity(0))
        for line in _read(self._cgroup).splitlines():
            if line.startswith(b"throttled_usec "):
                found[Usage.THROTTLED_US] = int(line.split()[1])
        return found


def _steal_of(stat: bytes, cpus: set[int]) -> int:
    """Time that was stolen from some processors, by /proc/stat."""
    total = 0
    for line in stat.splitlines():
        name, *times = line.split()
        if name[3:].isdigit() and name.startswith(b"cpu") and int(name[3:]) in cpus:
            total += int(times[7])
    return total


def _cpu_stat_paths() -> list[str]:
    """Where the control group of this process tells how long it was throttled."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    return [f"/sys/fs/cgroup{own.rstrip('/')}/cpu.stat", "/sys/fs/cgroup/cpu.stat"]


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(fd: int | None) -> bytes:
    if fd is None:
        return b""
    try:
        return os.pread(fd, 1 << 16, 0)
    except OSError:
        return b""
