"""The worker of test_benchmark_jobs.py."""

from __future__ import annotations

import os
import signal
import time


class Obedient:
    """Answers requests, and fails on request on rank `bad`."""

    def __init__(self, rank: int, world_size: int, bad: int = -1) -> None:
        self._is_bad = rank == bad
        self._rank = rank
        self._world_size = world_size
        self._is_prepared = False

    def double(self, number: int) -> int:
        return 2 * number + self._rank

    def prepare(self, nbytes: int) -> None:
        self._is_prepared = True

    def time(self, iterations: int) -> float:
        if not self._is_prepared:
            raise RuntimeError("prepare() comes first")
        if self._is_bad and iterations > 1:
            raise ArithmeticError("wrong answer")
        return 0.001 * iterations

    def misbehave(self, how: str) -> None:
        if not self._is_bad:
            return
        if how == "raise":
            raise ValueError("no good\nsecond line")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            while True:
                time.sleep(1)
