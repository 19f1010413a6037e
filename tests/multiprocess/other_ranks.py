"""Waits until another rank of a group is in a given call, and sends it a signal at that moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from paceline._core import CALL_KINDS

WAIT_S = 60.0
BARRIER, ALL_REDUCE = CALL_KINDS["barrier"], CALL_KINDS["all_reduce"]


def until(condition: Callable[[], Any]) -> Any:
    """Poll until the condition is true, and return its value.

    It polls, because there is no event for what another thread or rank is doing.
    """
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def until_calling(group: Any, rank: int, kind: int) -> None:
    """Wait until that rank's newest call is of that kind."""
    until(lambda: group._core.records()[rank]["call"]["kind"] == kind)


def interrupt(group: Any, rank: int, number: int = signal.SIGUSR1) -> None:
    os.kill(group._core.records()[rank]["pid"], number)


def interrupt_sleep(group: Any, rank: int) -> None:
    """Interrupt a rank that sleeps, and return once it has woken up and sleeps again."""
    pid = group._core.records()[rank]["pid"]

    def sleeps() -> int:
        """How often the rank has gone to sleep; 0 if it is awake."""
        with open(f"/proc/{pid}/task/{pid}/status", encoding="ascii") as file:
            status = dict(line.split(":", 1) for line in file)
        return int(status["voluntary_ctxt_switches"]) if status["State"].split()[0] == "S" else 0

    before = until(sleeps)
    interrupt(group, rank)
    until(lambda: sleeps() > before)
