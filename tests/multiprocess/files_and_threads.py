"""What a rank still holds of groups and models that are gone: open files and threads."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from tests.multiprocess.other_ranks import until


def files_and_threads() -> tuple[int, int]:
    """How many files this process has open, and how many threads it has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def until_no_more_than(before: tuple[int, int], *, collecting: bool = False) -> None:
    """Wait until this process has no more open files and threads than it had before.

    It has to wait, because the kernel lists a thread for a moment after Python's `join`, or `pthread_join`,
    has returned.

    Args:
        before: What `files_and_threads` returned.
        collecting: Collect garbage each time, because one thread ends after the other, and only with each
            goes what it has held.
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
    """Of the files and of the threads that there are now."""
    files, threads = Path("/proc/self/fd"), Path("/proc/self/task")
    return (
        [str(each.readlink()) for each in files.iterdir() if each.is_symlink()],
        [(each / "comm").read_text().strip() for each in threads.iterdir()],
    )
