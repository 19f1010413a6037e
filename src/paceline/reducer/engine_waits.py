"""Waiting for somebody else's all-reduce: up to a deadline, and how its failures are told.

The one idea: what a process group knows of a failure is little (no rank, no name), so the error says which
bucket it was and which parameters lie in it. Imports only what is in this folder, `errors` and the standard
library.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable

from paceline.errors import CollectiveError, DeadlineError, PeerLostError
from paceline.reducer.plan import Plan
from paceline.reducer.report import shorten

_SHORTEST_NAP_S = 0.00002
_LONGEST_NAP_S = 0.001
_SIGNS_OF_A_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "roken pipe",
    "onnection closed",
    "onnection refused",
)
_SIGNS_OF_A_LATE_PEER = ("TIMEOUT", "Timed out")

STATUS = "the status of all ranks at the end of backward"


class EngineWaits:
    """One rank's waits for the engine that averages its buckets.

    Args:
        rank: Of this process.
        world_size: Number of ranks.
        engine: What moves the bytes, in words: "torch's gloo process group".
        timeout_s: Most seconds of one wait.
        warn_after_s: Seconds after which a wait is reported.
        plan: Of the buckets, if there are any.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        engine: str,
        timeout_s: float,
        warn_after_s: float,
        plan: Plan | None = None,
    ) -> None:
        self._who = f"rank {rank} of {world_size}"
        self._engine = engine
        self._timeout_s = timeout_s
        self._warn_after_s = warn_after_s
        self._plan = plan

    def poll(self, is_completed: Callable[[], bool], what: int | str) -> None:
        """Sleep until some work is done, at most until the deadline.

        Args:
            is_completed: Whether it is done.
            what: A bucket's number, or the work in words.

        Raises:
            DeadlineError: It was not done in time.
        """
        started = time.monotonic()
        nap_s = _SHORTEST_NAP_S
        warns_at_s = self._warn_after_s
        while not is_completed():
            waited_s = time.monotonic() - started
            if waited_s > self._timeout_s:
                raise self._late(what)
            if waited_s > warns_at_s:
                warnings.warn(
                    f"{self._who} has waited {waited_s:.0f} s for some rank: {self._where(what)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                warns_at_s = math.inf
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def failed(self, error: RuntimeError, what: int | str) -> CollectiveError:
        """The engine's own error, with where it happened. Which rank it lost, an engine does not tell."""
        text = str(error)
        kind, likely = CollectiveError, ""
        if any(sign in text for sign in _SIGNS_OF_A_LOST_PEER):
            kind, likely = PeerLostError, "another rank died or raised"
        elif any(sign in text for sign in _SIGNS_OF_A_LATE_PEER):
            kind, likely = DeadlineError, "a rank is later than the engine's own time-out"
        return kind(
            f"{self._who.capitalize()} could not {_doing(what)}.",
            where=self._where(what),
            seen=text,
            likely=likely,
            hint="the first rank to fail tells the reason; look at the other ranks' output",
        )

    def _late(self, what: int | str) -> DeadlineError:
        return DeadlineError(
            f"{self._who.capitalize()} gave up waiting to {_doing(what)} after {self._timeout_s:.1f} s.",
            where=self._where(what),
            seen="the call did not complete; the process group does not tell which rank is missing",
            likely="a rank skipped this backward, is stuck in its data loader, or died",
            hint="look at the other ranks' output; `timeout_s` gives them longer",
        )

    def _where(self, what: int | str) -> str:
        if isinstance(what, int) and self._plan is not None:
            part = self._plan.buckets[what]
            names = shorten([self._plan.parameters[index].name for index in part.parameters])
            dtype = self._plan.sections[part.section].dtype
            what = f"bucket {what} ({part.nbytes / 2**20:.1f} MiB, {dtype}: {names})"
        return f"{what}, over {self._engine}"


def _doing(what: int | str) -> str:
    return "average gradients" if isinstance(what, int) or what == STATUS else "exchange values"
