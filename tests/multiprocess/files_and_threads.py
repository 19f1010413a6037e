"""Counts open files and threads, to check that groups and models leave none behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from tests.multiprocess.other_ranks import until


def files_and_threads() -> tuple[int, int]:
    """The numbers of open files and of threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def until_no_more_than(before: tuple[int, int], *, collecting: bool = False) -> None:
    """Wait until this process has no more open files and threads than it had before.

    It polls, because the kernel still lists a thread for a moment after Python's `join` or `pthread_join` has
    returned.

    Args:
        before: What `files_and_threads` returned.
        collecting: Collect garbage at each poll. Threads end one after another, and the objects that a
            thread holds become garbage only when it ends.
    """

    def is_so() -> bool:
        if collecting:
            gc.collect()
        files, threads = files_and_threads()
        return files <= before[0] and threads <= before[1]

    try:
        until(is_so)
    except AssertionError:
        raise AssertionError(f"{before} files and threads before, and now {_names()}") from None


def _names() -> tuple[list[str], list[str]]:
    """The names of the open files and of the threads."""
    files, threads = Path("/proc/self/fd"), Path("/proc/self/task")
    return (
        [str(each.readlink()) for each in files.iterdir() if each.is_symlink()],
        [(each / "comm").read_text().strip() for each in threads.iterdir()],
    )
