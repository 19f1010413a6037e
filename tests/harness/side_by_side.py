"""Runs programs that wait much longer than they compute, several of them at a time.

A worker of pytest runs one test after the other. If a test waits for a deadline of seconds that its ranks are
meant to reach, the core is idle meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Name = TypeVar("_Name", bound=Hashable)


@contextlib.contextmanager
def run_side_by_side(
    runs: Mapping[_Name, functools.partial[list[Any]]], *, at_once: int = 5
) -> Iterator[dict[_Name, Future[list[Any]]]]:
    """Begin all runs, which are calls of `run_ranks`, in threads; a result is ready when its run has ended.

    The end of the context cancels runs that have not begun, and waits for the others.

    Args:
        runs: By name, in the order in which they begin.
        at_once: Number of runs that are under way at a time. They must compute little: none may miss its
            deadline because of the others.

    Example:
        >>> runs = {n: functools.partial(run_ranks, wait_for, 2, {"rank": n}) for n in range(2)}
        >>> with run_side_by_side(runs) as results:
        ...     assert results[0].result() == results[1].result()
    """
    filters = list(warnings.filters)  # pytest has other filters between two tests
    pool = ThreadPoolExecutor(at_once)
    try:
        yield {name: pool.submit(run, warning_filters=filters) for name, run in runs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
