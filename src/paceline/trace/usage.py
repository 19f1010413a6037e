"""Measures processor time, page faults, and what kept this process from running (throttling, steal, queues).

The totals only grow. Those of the machine and of the control group are older than the process, so only their
differences matter. The files stay open, so that a reading costs microseconds.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

from paceline.trace.totals import Total

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class UsageReader:
    def __init__(self) -> None:
        self._schedstat = _open("/proc/self/schedstat")
        self._stat = _open("/proc/stat")
        self._cgroup = next(
            (fd for fd in map(_open, _cpu_stat_paths()) if fd is not None and b"throttled_usec" in _read(fd)),
            None,
        )

    def read(self) -> dict[Total, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        found: dict[Total, float] = {
            Total.CPU_NS: time.process_time_ns(),
            Total.SWITCHES: used.ru_nivcsw,
            Total.MAJOR_FAULTS: used.ru_majflt,
            Total.MINOR_FAULTS: used.ru_minflt,
        }
        with contextlib.suppress(IndexError, ValueError):
            found[Total.RUN_QUEUE_NS] = int(_read(self._schedstat).split()[1])
        with contextlib.suppress(IndexError, ValueError):
            ticks = _steal_of(_read(self._stat), os.sched_getaffinity(0))
            found[Total.STOLEN_NS] = ticks * _TICK_NS
        for line in _read(self._cgroup).splitlines():
            if line.startswith(b"throttled_usec "):
                found[Total.THROTTLED_NS] = int(line.split()[1]) * 1000
        return found


def resident_bytes(pid: int | None = None) -> int | None:
    """Resident memory of a process; None if it is unknown. `pid` None: this process."""
    try:
        pages = int(Path(f"/proc/{'self' if pid is None else pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None


def _steal_of(stat: bytes, cpus: set[int]) -> int:
    total = 0
    for line in stat.splitlines():
        name, *times = line.split()
        if name[3:].isdigit() and name.startswith(b"cpu") and int(name[3:]) in cpus:
            total += int(times[7])
    return total


def _cpu_stat_paths() -> list[str]:
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
