"""Waits for a framework's all-reduce up to a deadline, and writes the errors when it fails.

A process group names no rank, so the error says which bucket failed and which parameters it holds, and asks a
peer monitor for the rank.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.collectives.straggler_warning import describe_unknown_stragglers, next_warning_s
from paceline.errors import CollectiveError, DeadlineError, PeerLostError, warn
from paceline.health.peer_errors import is_of_a_late_peer, is_of_a_lost_peer, late_error, timeout_hint
from paceline.health.peer_monitor import PeerMonitor
from paceline.reducer.backward_errors import shorten
from paceline.reducer.plan import Plan

_SHORTEST_NAP_S = 0.00002
_LONGEST_NAP_S = 0.001
_NAPS = 8  # a nap is 1/8 of the time waited so far, so polling lengthens no wait by more than that
_USUAL_NAPS = 16  # some milliseconds: a wait of usual length does not ask the peer monitor
_GRACE_S = 0.1
_FINDING_S = 1.0
_FINDING_LATE_S = 0.2
_SIGN_OF_A_SHARED_GPU = "Duplicate GPU"

STATUS = "the status of all ranks at the end of backward"


Rows = Callable[[], np.ndarray[Any, Any]]
"""Returns the arrays of all ranks, by rank, after the call that gathers them is over."""


class ProcessGroupWaits:
    """One rank's waits for the process group that averages its buckets."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        words: str,
        timeout_s: float,
        warn_after_s: float,
        plan: Plan | None = None,
        peer_monitor: PeerMonitor | None = None,
    ) -> None:
        self._who = f"rank {rank} of {world_size}"
        self._words = words
        self._timeout_s = timeout_s
        self._warn_after_s = warn_after_s
        self._plan = plan
        self.peer_monitor = peer_monitor

    def but(self, *, plan: Plan | None = None, timeout_s: float | None = None) -> ProcessGroupWaits:
        """A copy for the buckets of a plan, or with another deadline."""
        waits = copy.copy(self)
        waits._plan, waits._timeout_s = plan or self._plan, timeout_s or self._timeout_s
        return waits

    def poll(self, is_completed: Callable[[], bool], what: int | str) -> None:
        """Sleep until a call is complete, at most until the deadline."""
        started = time.monotonic()
        warns_at_s = self._warn_after_s
        has_published = False
        naps = 0
        while not is_completed():
            waited_s = time.monotonic() - started
            nap_s = min(max(waited_s / _NAPS, _SHORTEST_NAP_S), _LONGEST_NAP_S)
            if waited_s > self._timeout_s:
                raise self._late(what)
            if waited_s > warns_at_s:
                left_s = self._timeout_s - waited_s
                warn(describe_unknown_stragglers(self._who, self._where(what), waited_s, left_s))
                warns_at_s = next_warning_s(self._warn_after_s, waited_s)
            if self.peer_monitor is not None and naps >= _USUAL_NAPS:
                if not has_published:
                    has_published = True
                    self.peer_monitor.publish_waiting()
                if (lost := self.peer_monitor.lost()) is not None:
                    # A rank that left after this backward has already sent everything that this call needs.
                    if _completes_soon(is_completed):
                        break
                    self.peer_monitor.give_up()
                    raise self._named(lost, what)
            time.sleep(nap_s)
            naps += 1
        if has_published and self.peer_monitor is not None:
            self.peer_monitor.publish_done()

    def failed(self, error: RuntimeError, what: int | str) -> CollectiveError:
        if self.peer_monitor is not None:
            self.peer_monitor.give_up()
        if isinstance(error, CollectiveError):  # from Paceline's own process group, which knows the rank
            return self._named(error, what)
        text = str(error)
        kind, likely = CollectiveError, ""
        hint = "the first rank to fail gives the reason; look at the other ranks' output"
        is_lost, is_late = is_of_a_lost_peer(text), is_of_a_late_peer(text)
        if self.peer_monitor is not None and (is_lost or is_late):
            # Paddle's Gloo reports a broken connection as a time-out; in a real time-out no rank is lost.
            lost = self.peer_monitor.find_lost(_FINDING_S if is_lost else _FINDING_LATE_S)
            if lost is not None:
                return self._named(lost, what)
        # A process group that timed out closes its connections, which other ranks see first.
        if is_lost and (late := self._late_by_name(what, text, is_silent=True)) is not None:
            return late
        if is_lost:
            kind, likely = PeerLostError, "another rank died or raised, or the connection to it broke"
        elif is_late:
            if (late := self._late_by_name(what, text)) is not None:
                return late
            if self.peer_monitor is not None and (lost := self.peer_monitor.lost()) is not None:
                return self._named(lost, what)
            kind, likely = DeadlineError, "a rank is later than the process group's own time-out"
        elif _SIGN_OF_A_SHARED_GPU in text:
            likely = "two ranks of a host use one GPU, which NCCL refuses"
            hint = (
                "give each rank a GPU of its own, by torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); "
                "or form the process group with Gloo, whose ranks may share one"
            )
        return kind(
            f"{self._who.capitalize()} could not {_doing(what)}.",
            where=self._where(what),
            seen=text,
            likely=likely,
            hint=hint,
        )

    def _named(self, lost: CollectiveError, what: int | str) -> CollectiveError:
        is_of_a_late_rank = isinstance(lost, DeadlineError) and not lost.fields.get("late")
        is_of_a_late_rank |= "DeadlineError" in lost.summary + lost.seen
        if is_of_a_late_rank and (late := self._late_by_name(what)) is not None:
            return late  # another rank has given up before this one, for the same reason
        fields = {**lost.fields}
        rows = {row: getattr(lost, row) for row in ("seen", "expected", "got", "likely", "hint")}
        return type(lost)(lost.summary, where=f"{self._who}, {self._where(what)}", **rows, **fields)

    def _late_by_name(
        self, what: int | str, text: str = "", after: str = "", *, is_silent: bool = False
    ) -> DeadlineError | None:
        if self.peer_monitor is None:
            return None
        late = self.peer_monitor.silent() if is_silent else self.peer_monitor.late()
        if late is None:
            return None
        return late_error(self._who, late, _doing(what), self._where(what), text, after)

    def _late(self, what: int | str) -> CollectiveError:
        if self.peer_monitor is not None:
            self.peer_monitor.give_up()
        named = self._late_by_name(what, after=f" after {self._timeout_s:.1f} s")
        if named is not None and named.fields.get("late"):
            return named
        # A rank may have left, or another rank may have given up meanwhile and reported the reason.
        if self.peer_monitor is not None and (lost := self.peer_monitor.find_lost(0.0)) is not None:
            return self._named(lost, what)
        if named is not None:
            return named
        return DeadlineError(
            f"{self._who.capitalize()} gave up waiting to {_doing(what)} after {self._timeout_s:.1f} s.",
            where=self._where(what),
            seen="the call did not complete; the process group does not say which rank is missing",
            likely="a rank skipped this backward, is stuck in its data loader, or died",
            hint=f"look at the other ranks' output; {timeout_hint('them')}",
        )

    def _where(self, what: int | str) -> str:
        if isinstance(what, int) and self._plan is not None:
            part = self._plan.buckets[what]
            names = shorten([self._plan.parameters[index].name for index in part.parameters])
            dtype = self._plan.sections[part.section].dtype
            what = f"bucket {what} ({part.nbytes / 2**20:.1f} MiB, {dtype}: {names})"
        return f"{what}, over {self._words}"


def _completes_soon(is_completed: Callable[[], bool]) -> bool:
    """Whether a call completes soon, from messages that are already on their way."""
    until = time.monotonic() + _GRACE_S
    while not is_completed():
        if time.monotonic() > until:
            return False
        time.sleep(_LONGEST_NAP_S)
    return True


def _doing(what: int | str) -> str:
    return "average gradients" if isinstance(what, int) or what == STATUS else "exchange values"
