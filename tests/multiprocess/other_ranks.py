"""What another rank of a group is doing, and a signal for it at just that moment."""

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
    """Poll, because what another thread or rank is inside of can't be waited for; what was found."""
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def until_calling(group: Any, rank: int, kind: int) -> None:
    """Until that rank's newest call is of that kind."""
    until(lambda: group._core.records()[rank]["call"]["kind"] == kind)


def interrupt(group: Any, rank: int, number: int = signal.SIGUSR1) -> None:
    os.kill(group._core.records()[rank]["pid"], number)


def interrupt_sleep(group: Any, rank: int) -> None:
    """The same for a rank that waits, and return once it has seen the signal and waits again."""
    pid = group._core.records()[rank]["pid"]

    def sleeps() -> int:
        """How often it went to sleep, if it sleeps."""
        with open(f"/proc/{pid}/task/{pid}/status", encoding="ascii") as file:
            status = dict(line.split(":", 1) for line in file)
        return int(status["voluntary_ctxt_switches"]) if status["State"].split()[0] == "S" else 0

    before = until(sleeps)
    interrupt(group, rank)
    until(lambda: sleeps() > before)
