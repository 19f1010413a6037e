"""Detects dead and late ranks where gradients go over an external process group: Gloo, NCCL, MPI.

Such a group says that a connection broke, or nothing at all; but the ranks of one host also
share memory in which a death is marked by the kernel, an exception leaves its text, and each rank says what
it does, and those of several hosts have a control channel. So whoever waits for the process group looks there
for a name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from paceline import _core
from paceline.errors import CollectiveError, GroupClosedError, RegionError
from paceline.health.control_channel import ControlChannel
from paceline.health.peer_errors import (
    LateRanks,
    died_error,
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


class Tell(Protocol):
    """Lets the others know what this rank does, and how many forwards since its last backward."""

    def __call__(self, activity: str, forwards: int = 0, /) -> None: ...


class PeerMonitor(Protocol):
    """What one rank can learn of the others, and tells them, beside the process group."""

    def tell(self, activity: str, forwards: int = 0, /) -> None:
        """Let the others know what this rank does; see `Tell`. Not collective, does not block."""
        ...

    def tell_waiting(self) -> None:
        """This rank has done its part and waits for the process group."""
        ...

    def tell_done(self) -> None:
        """What it waited for has come."""
        ...

    def give_up(self) -> None:
        """This rank is about to raise because of another one: nobody should blame it from now on."""
        ...

    def fail(self, error: BaseException) -> None:
        """This rank has raised, and makes none of the calls that the others wait for: they raise, quoting it.

        Not collective, does not block.
        """
        ...

    def lost(self) -> CollectiveError | None:
        """The error that names a rank that has died or raised; None: there is none. Does not block."""
        ...

    def find_lost(self, within_s: float) -> CollectiveError | None:
        """As `lost`, or a rank that left, once a connection has broken. Blocks at most `within_s`."""
        ...

    def late(self) -> LateRanks | None:
        """Ranks that are not waiting, as this one is; None: nobody knows of any. Blocks 0.5 s at most."""
        ...

    def silent(self) -> LateRanks | None:
        """As `late`, but only ranks whose processes do not run."""
        ...


class ChannelPeerMonitor:
    """A `PeerMonitor` for ranks on several hosts. What they do is asked when one is late (`liveness_check`).

    Args:
        channel: The channel of all ranks that train the model, in the same order.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._activity = ""
        self._has_given_up = False

    def tell(self, activity: str, forwards: int = 0, /) -> None:
        self._activity = activity
        if not self._has_given_up:
            self._channel.say(activity)

    def tell_waiting(self) -> None:
        if not self._has_given_up:
            self._channel.say(self._activity, is_waiting=True)

    def tell_done(self) -> None:
        self.tell(self._activity)

    def give_up(self) -> None:
        """Who raises first says why, and others do not speak after that."""
        self._has_given_up = True
        self._channel.say(_GAVE_UP, is_waiting=True, has_given_up=True)

    def fail(self, error: BaseException) -> None:
        self._channel.tell(error)

    def lost(self) -> CollectiveError | None:
        return self._channel.failure

    def find_lost(self, within_s: float) -> CollectiveError | None:
        if (error := self._channel.wait(within_s)) is not None:
            return error
        left = self._channel.left
        if not left:
            return None
        ranks = tuple(each.rank for each in left)
        return left_error(ranks, len(self._channel.members), ", ".join(each.describe() for each in left))

    def late(self) -> LateRanks | None:
        return self._channel.late()

    def silent(self) -> LateRanks | None:
        return self._channel.late(is_silent=True)


def report_no_peer_monitor(error: RegionError, rank: int) -> None:
    """Log on rank 0 that errors will not name lost and late ranks, and why.

    Args:
        error: Why there is no memory for it; every rank has it. Gradients need none.
        rank: The rank of this process.
    """
    if rank == 0:
        _log.warning(
            "paceline: gradients are averaged over the process group, and without shared memory nobody can "
            "name a rank that is lost or late: errors say what the group itself says, at its own time-out."
            "\n%s",
            error,
        )


def tell_on_host_too(core: _core.HostGroup, peer_monitor: PeerMonitor | None) -> Tell:
    """What tells the ranks of this host, in their memory, and those of other hosts what this rank does."""
    if peer_monitor is None:
        return core.set_activity
    tell_others = peer_monitor.tell

    def tell(activity: str, forwards: int = 0, /) -> None:
        core.set_activity(activity, forwards)
        tell_others(activity, forwards)

    return tell


class MemoryPeerMonitor:
    """A `PeerMonitor` for ranks of one host.

    Args:
        core: A group of all ranks that train the model, in the same order. No gradient is sent over it.
        ranks: The numbers of its ranks, where others know them by others; None: they are those of the group.

    Attributes:
        core: The same.
    """

    def __init__(self, core: _core.HostGroup, ranks: Sequence[int] | None = None) -> None:
        self.core = core
        self._ranks = range(core.world_size) if ranks is None else ranks
        self._before = "", 0  # what this rank was in before it waited
        self._has_given_up = False

    def tell(self, activity: str, forwards: int = 0, /) -> None:
        """Let the others know what this rank does. Not collective, does not block."""
        if not self._has_given_up:
            self.core.set_activity(activity, forwards)

    def tell_waiting(self) -> None:
        """This rank has done its part and waits for the process group."""
        own = self.core.records()[self.core.rank]
        self._before = own["activity"], own["forwards"]
        self.tell(_WAITING, own["forwards"])

    def tell_done(self) -> None:
        """What it waited for has come: it goes on with what it was in."""
        self.tell(*self._before)

    def give_up(self) -> None:
        """This rank is about to raise because of another one: nobody should blame it from now on."""
        self.tell(_GAVE_UP)
        self._has_given_up = True

    def fail(self, error: BaseException) -> None:
        self.core.abort(f"{type(error).__name__}: {error}")

    def lost(self) -> CollectiveError | None:
        """The error that names a rank that has died or raised; None: there is none. Does not block."""
        try:
            self.core.check_usable()
        except GroupClosedError:
            return None  # by this rank: it has no more to see
        except CollectiveError as error:
            return error
        return None

    def find_lost(self, within_s: float) -> CollectiveError | None:
        """As `lost`, or a rank that left, once a connection has broken. Blocks at most `within_s`.

        A rank that has left is none to blame before that: in the last backward it may be the first to be
        done.
        """
        until = time.monotonic() + within_s
        while True:
            error = self.lost()
            if error is not None:
                return error
            suspects = self._suspects()
            died = [facts for facts in suspects if facts["state"] == "dead"]
            left = [facts for facts in suspects if facts["state"] == "left"]
            if left and not died:
                # Asked again: a rank may have died between the two looks, and has not left then.
                if (error := self.lost()) is not None:
                    return error
                return left_error(ranks_of(left), self.core.world_size, record_rows(left))
            if time.monotonic() > until:
                # Whoever looks after the group's memory tells a death with more words, a moment later.
                return died_error(ranks_of(died), self.core.world_size, record_rows(died)) if died else None
            time.sleep(_NAP_S)

    def late(self) -> LateRanks | None:
        suspects = self._suspects()
        return late_by_records(suspects) if suspects else self.silent()

    def silent(self) -> LateRanks | None:
        stopped = [each for each in self._records() if process_state(each["pid"]) in STOPPED]
        return late_by_records(stopped) if stopped else None

    def _suspects(self) -> list[dict[str, Any]]:
        """What is known of all ranks that neither wait nor have given up, as this one does."""
        own = self._ranks[self.core.rank]
        return [each for each in self._records() if each["rank"] != own and each["activity"] not in _INNOCENT]

    def _records(self) -> list[dict[str, Any]]:
        return [{**each, "rank": self._ranks[each["rank"]]} for each in self.core.records()]


class HostPeerMonitor:
    """A `PeerMonitor` for calls of the ranks of one of several hosts: failures, and which of them is late.

    Args:
        of_all: The one for all ranks that train the model. It says more about a failure: the host, and what
            other hosts have met.
        core: The memory of this host. Nothing is sent over it.
        ranks: The ranks of this host, as the other peer monitor numbers them.
    """

    def __init__(self, of_all: PeerMonitor, core: _core.HostGroup, ranks: Sequence[int]) -> None:
        self._both = of_all, MemoryPeerMonitor(core, ranks)
        self.fail, self.lost, self.find_lost = of_all.fail, of_all.lost, of_all.find_lost
        self.silent = of_all.silent

    def tell(self, activity: str, forwards: int = 0, /) -> None:
        for each in self._both:
            each.tell(activity, forwards)

    def tell_waiting(self) -> None:
        for each in self._both:
            each.tell_waiting()

    def tell_done(self) -> None:
        for each in self._both:
            each.tell_done()

    def give_up(self) -> None:
        for each in self._both:
            each.give_up()

    def late(self) -> LateRanks | None:
        """Ranks of this host, which make the calls; else one anywhere whose process does not run."""
        of_all, on_host = self._both
        return on_host.late() or of_all.silent()
