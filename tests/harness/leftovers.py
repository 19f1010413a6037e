"""Finds leftovers of a run: names in /dev/shm, our files in the temporary folder, processes.

Other programs use /dev/shm too. A name counts as left behind when no living process holds it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")
# Semaphores of joblib, which scikit-learn loads, and of multiprocessing, which Paceline does not use. A test
# that runs beside ours drops its own late, above all when it kills the processes that made them.
_OF_OTHERS = ("sem.loky-", "sem.mp-")
# The kernel tears large address spaces down after a process counts as dead. A file on its way from a loader's
# worker to a test that runs beside this one is, for a while, held by neither process. Real leftovers stay
# longer.
_PATIENCE_S = 10.0


def shm_names() -> frozenset[str]:
    """Names in /dev/shm that belong to this user."""
    names = set()
    for path in SHM.iterdir() if SHM.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid() and not path.name.startswith(_OF_OTHERS):
                names.add(path.name)
    return frozenset(names)


def left_in_shm(before: frozenset[str]) -> list[str]:
    """Names that are new since `before` and that no living process has open or mapped."""
    until = time.monotonic() + _PATIENCE_S
    while new := shm_names() - before:
        orphans = sorted(name for name in new if not _is_held(SHM / name))
        if not orphans or time.monotonic() > until:
            return orphans
        time.sleep(0.05)
    return []


def left_in_folder(folder: Path) -> list[str]:
    """Sockets and files of Paceline that a rank left in its temporary folder.

    The recording of a job that failed stays on purpose: `paceline trace` shows it.
    """
    recordings = folder / f"paceline-{os.getuid()}"
    found = [
        path for path in folder.rglob("*paceline*") if path != recordings or not _are_of_jobs(recordings)
    ]
    return sorted(str(path.relative_to(folder)) for path in found)


def _are_of_jobs(recordings: Path) -> bool:
    """True if the path holds only folders of jobs, and at least one."""
    jobs = list(recordings.iterdir())
    return bool(jobs) and all((job / "job.json").is_file() for job in jobs)


def left_running(leaders: Iterable[int]) -> dict[int, list[int]]:
    """Processes that outlived the rank that started them, by the rank's process id. Kills them."""
    until = time.monotonic() + _PATIENCE_S
    waiting = {leader: [leader] for leader in leaders}
    while waiting := {leader: pids for leader in waiting if (pids := _members(leader))}:
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    for leader in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    return waiting


def _is_held(path: Path) -> bool:
    wanted = str(path)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "maps").read_text():
                return True
            if any(os.readlink(fd) == wanted for fd in (process / "fd").iterdir()):
                return True
    return False


def _members(leader: int) -> list[int]:
    """Living processes of a process group. A zombie only waits for its parent and holds nothing."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return []
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last ')' may hold any character. After it: state, parent, process group.
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == leader and state not in "ZX":
                members.append(int(stat.parent.name))
    return members
