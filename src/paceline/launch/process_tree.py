"""The tree of processes below this one, in which every process can be found and ended.

The kernel kills a rank with its parent (PR_SET_PDEATHSIG), and reparents orphans to this process instead of
init (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Helper processes of a rank, such as multiprocessing's resource tracker, need a moment to notice its end.
_LEFTOVER_GRACE_S = 1.0
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, signum: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _live_parent(name)
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    found = list(children.get(ancestor, ()))
    for pid in found:  # grows while it is walked: breadth first
        found.extend(children.get(pid, ()))
    return found


def has_had_children(pid: int) -> bool:
    """Whether a process, which may have ended, has waited for a child that used 10 ms of CPU time."""
    fields = _stat_of(pid)
    return bool(fields) and int(fields[13]) + int(fields[14]) > 0  # cutime and cstime


def cpu_seconds(pids: Iterable[int]) -> float:
    """The processor time that these processes and all their descendants have used."""
    ticks = 0
    for pid in pids:
        for member in (pid, *descendants(pid)):
            fields = _stat_of(member)
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def pass_on(pids: Iterable[int], signum: int) -> list[int]:
    """Send a signal to those processes that it would not end; returns the others."""
    deaf = []
    for pid in pids:
        if _survives(pid, signum):
            send(pid, signum)
        else:
            deaf.append(pid)
    return deaf


def _survives(pid: int, signum: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = dict(line.split(b":", 1) for line in file if line.startswith(b"Sig"))
    except OSError:
        return False
    return any(int(masks[name], 16) >> (signum - 1) & 1 for name in (b"SigBlk", b"SigIgn", b"SigCgt"))


def children(parent: int) -> list[int]:
    return [pid for pid in descendants(parent) if _live_parent(str(pid)) == parent]


def _live_parent(pid: str) -> int | None:
    """The parent's pid; None for a zombie, or if the process is gone."""
    fields = _stat_of(pid)
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[1])


def _stat_of(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; empty if it is gone. See proc_pid_stat(5)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in brackets may itself contain brackets and spaces.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def describe(pid: int) -> str:
    """A process for messages: "pid 123 (sleep 100)"."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"pid {pid} ({command[:80]})" if command else f"pid {pid}"


def send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def wait_readable(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Those of `fds` (any number) that can be read or have ended; empty if there are none in time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    # The kernel's time-out has 31 bits of milliseconds: 24 days.
    limit_ms = None if timeout_s is None else min(max(0.0, timeout_s) * 1000, 2**31 - 1)
    return {fd for fd, _ in poll.poll(limit_ms)}


def end_leftovers(wakeup: int) -> list[str]:
    """End the processes that ended ranks have left below this one; returns those that had to be killed."""
    deadline = time.monotonic() + _LEFTOVER_GRACE_S
    while descendants(os.getpid()) and time.monotonic() < deadline:
        if wait_readable([wakeup], deadline - time.monotonic()):
            os.read(wakeup, 512)
        reap_children()
    left = [describe(pid) for pid in descendants(os.getpid())]
    kill_descendants()
    return left


def kill_descendants(within_s: float = 10.0) -> list[int]:
    """Kill every process below this one that `adopt_orphans` keeps in reach; returns those still alive.

    Kills in rounds: a process that was just being started when its parent died is found in the next round.
    """
    deadline = time.monotonic() + within_s
    while True:
        alive = descendants(os.getpid())
        for pid in alive:
            send(pid, signal.SIGKILL)
        reap_children()
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.005)  # callers may have any signal handlers, so nothing is sure to wake this process


def reap_children() -> dict[int, int]:
    """Reap all children that have ended: pid to status, negative for a signal as in `Popen.returncode`."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended
