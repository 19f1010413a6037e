"""Detects dead and late ranks when gradients go over a process group (Gloo, NCCL, MPI).

Errors of a process group name no rank. But the ranks of one host share memory: the kernel marks a death
there, a rank that raises leaves the text of its exception, and each rank publishes what it does. Ranks of
several hosts have a control channel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from paceline import _core
from paceline.errors import CollectiveError, GroupClosedError, RegionError
from paceline.health.control_channel import ControlChannel
from paceline.health.liveness_check import Activity
from paceline.health.peer_errors import (
    LateRanks,
    died_error,
    last_activity,
    late_by_records,
    left_error,
    ranks_of,
    record_rows,
)
from paceline.stacks import STOPPED, process_state

_WAITING = "waiting for the process group"
_GAVE_UP = "given up on the process group"
_INNOCENT = (_WAITING, _GAVE_UP)
_NAP_S = 0.002
_log = logging.getLogger("paceline")


class Publish(Protocol):
    """Publishes what this rank does, and how many forwards it has made since its last backward."""

    def __call__(self, activity: str, forwards: int = 0, /) -> None: ...


class ChannelSource:
    """What the ranks of several hosts know about each other, through their control channel."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self.fail, self.lost, self.late = channel.report_failure, channel.wait, channel.late

    def publish(self, activity: str, forwards: int) -> None:
        self._channel.activity = Activity(activity)

    def publish_activity(self, activity: Activity, forwards: int) -> None:
        self._channel.activity = activity

    def published(self) -> tuple[Activity, int]:
        return Activity(self._channel.activity.text), 0

    def find_lost(self, within_s: float) -> CollectiveError | None:
        if (error := self._channel.wait(within_s)) is not None:
            return error
        left = self._channel.left
        if not left:
            return None
        rows = [
            f"{each.describe()} has left{last_activity(self._channel.last_activity_of(each.rank))}"
            for each in left
        ]
        ranks = tuple(each.rank for each in left)
        return left_error(ranks, len(self._channel.members), "\n".join(rows))


class MemorySource:
    """What the ranks of one host know about each other, through its shared memory.

    Args:
        core: A group of all ranks that train the model, in the same order. No gradient is sent over it.
        ranks: The rank numbers to use in errors, by rank of `core`; None: those of `core` itself.
    """

    def __init__(self, core: _core.HostGroup, ranks: Sequence[int] | None = None) -> None:
        self.core = core
        self.publish: Callable[[str, int], None] = core.set_activity
        self._ranks = range(core.world_size) if ranks is None else ranks
        self._published = Activity(), 0  # what this rank was doing before it waited

    def publish_activity(self, activity: Activity, forwards: int) -> None:
        text = _WAITING if activity.is_waiting else activity.text
        self.core.set_activity(_GAVE_UP if activity.has_given_up else text, forwards)

    def published(self) -> tuple[Activity, int]:
        own = self.core.records()[self.core.rank]
        if own["activity"] != _WAITING:
            self._published = Activity(own["activity"]), own["forwards"]
        return self._published

    def fail(self, error: BaseException) -> None:
        self.core.abort(f"{type(error).__name__}: {error}")

    def lost(self, within_s: float) -> CollectiveError | None:
        until = time.monotonic() + within_s
        while True:
            try:
                self.core.check_usable()
            except GroupClosedError:
                return None  # closed by this rank, so there is nothing more to report
            except CollectiveError as error:
                return error
            if time.monotonic() >= until:
                return None
            time.sleep(_NAP_S)

    def find_lost(self, within_s: float) -> CollectiveError | None:
        until = time.monotonic() + within_s
        while True:
            error = self.lost(0.0)
            if error is not None:
                return error
            suspects = self._suspects()
            died = [facts for facts in suspects if facts["state"] == "dead"]
            left = [facts for facts in suspects if facts["state"] == "left"]
            if left and not died:
                # Check again: a rank may have died between the two checks, and then it has not left.
                if (error := self.lost(0.0)) is not None:
                    return error
                return left_error(ranks_of(left), self.core.world_size, record_rows(left))
            if time.monotonic() > until:
                # The group's own monitor of its memory reports a death in more detail, a moment later.
                return died_error(ranks_of(died), self.core.world_size, record_rows(died)) if died else None
            time.sleep(_NAP_S)

    def late(self, *, is_silent: bool = False) -> LateRanks | None:
        found = [] if is_silent else self._suspects()
        if not found:
            found = [each for each in self._records() if process_state(each["pid"]) in STOPPED]
        return late_by_records(found) if found else None

    def _suspects(self) -> list[dict[str, Any]]:
        """Ranks that are neither waiting nor have given up."""
        own = self._ranks[self.core.rank]
        return [each for each in self._records() if each["rank"] != own and each["activity"] not in _INNOCENT]

    def _records(self) -> list[dict[str, Any]]:
        return [{**each, "rank": self._ranks[each["rank"]]} for each in self.core.records()]


Source: TypeAlias = MemorySource | ChannelSource
"""Where a rank publishes its state, and reads that of the others."""


class PeerMonitor:
    """Publishes the state of this rank and detects dead and late ranks, beside the process group.

    Args:
        source: Of all ranks that train the model: the memory of their host, or their control channel.
        on_host: The memory of this host, if only its ranks make these calls (and not all ranks of `source`):
            late ranks are looked for there. Failures still come from `source`, which knows the host and what
            other hosts have seen. None: all ranks make these calls.
    """

    def __init__(self, source: Source, on_host: MemorySource | None = None) -> None:
        self._source, self._on_host = source, on_host
        self._sources: list[Source] = [source] if on_host is None else [source, on_host]
        self._before: list[tuple[Activity, int]] = []
        self._has_given_up = False

    @property
    def core(self) -> _core.HostGroup | None:
        return self._source.core if isinstance(self._source, MemorySource) else None

    def publish(self, activity: str, forwards: int = 0, /) -> None:
        """Publish what this rank does. Does not block."""
        if not self._has_given_up:
            for each in self._sources:
                each.publish(activity, forwards)

    def publish_waiting(self) -> None:
        """Publish that this rank has done its part and waits for the process group."""
        if not self._has_given_up:
            self._before = [each.published() for each in self._sources]
            for each, (activity, forwards) in zip(self._sources, self._before):
                each.publish_activity(Activity(activity.text, is_waiting=True), forwards)

    def publish_done(self) -> None:
        """Publish that the wait is over: the rank goes on with its earlier activity."""
        if not self._has_given_up:
            for each, before in zip(self._sources, self._before):
                each.publish_activity(*before)

    def give_up(self) -> None:
        """This rank is about to raise because of another one: from now on no rank should blame it.

        The rank that raises first gives the reason; the state of this rank does not change after that.
        """
        self._has_given_up = True
        for each in self._sources:
            each.publish_activity(Activity(_GAVE_UP, is_waiting=True, has_given_up=True), 0)

    def fail(self, error: BaseException) -> None:
        """Report that this rank has raised and will not make the calls that the others wait for.

        The others raise, quoting the error. Not collective, does not block.
        """
        self._source.fail(error)

    def lost(self, within_s: float = 0.0) -> CollectiveError | None:
        """The error that names a rank that has died or raised; None if there is none within `within_s`."""
        return self._source.lost(within_s)

    def find_lost(self, within_s: float) -> CollectiveError | None:
        """Like `lost`, but also finds a rank that left, after a connection has broken. Blocks at most
        `within_s`.

        A rank that has left is not to blame before that: in the last backward it may be the first to finish.
        """
        return self._source.find_lost(within_s)

    def late(self) -> LateRanks | None:
        """Ranks that are not waiting, unlike this one; None if none are known. Blocks 0.5 s at most."""
        if self._on_host is None:
            return self._source.late()
        return self._on_host.late() or self.silent()

    def silent(self) -> LateRanks | None:
        """Like `late`, but only ranks whose processes do not run."""
        return self._source.late(is_silent=True)


def report_no_peer_monitor(error: RegionError, rank: int) -> None:
    """Log on rank 0 that errors will not name lost and late ranks, and why."""
    if rank == 0:
        _log.warning(
            "paceline: gradients are averaged over the process group, and without shared memory errors "
            "cannot name a rank that is lost or late: they show the group's own text, at its own time-out."
            "\n%s",
            error,
        )


def publisher_with_host(core: _core.HostGroup, peer_monitor: PeerMonitor | None) -> Publish:
    if peer_monitor is None:
        return core.set_activity
    publish_to_others = peer_monitor.publish

    def publish(activity: str, forwards: int = 0, /) -> None:
        core.set_activity(activity, forwards)
        publish_to_others(activity, forwards)

    return publish
