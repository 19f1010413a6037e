"""The handles that asynchronous calls return.

The core has only addresses. These handles keep the arrays of a call alive until it is over, even if the
caller drops both the array and the Work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline import _core
from paceline.arguments import Arguments
from paceline.collectives.call_queue import CallQueue
from paceline.collectives.failures import describe_call
from paceline.collectives.latch import Latch
from paceline.errors import DeadlineError
from paceline.rendezvous.deadline import Deadline


class Work:
    """A collective that was started with `async_op=True`.

    Example:
        On both ranks: `work = group.all_reduce(gradients, async_op=True)`, other work meanwhile, then
        `work.wait()`; the array must not be touched in between.
    """

    def __init__(self, call: Callable[[], Any], arrays: object = None) -> None:
        self._calls = [call]  # the thread that pops the call makes it, or withdraws it
        self._arrays = arrays
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = Latch()

    def run(self) -> None:
        """Make the call. The queue's thread runs this once."""
        try:
            self._result = self._calls.pop()()
        except BaseException as error:  # for the thread that waits; an IndexError if the call was withdrawn
            self._error = error
        self._arrays = None
        self._over.open()

    def withdraw(self) -> bool:
        """Withdraw the call, so that it is not made. Returns False if it has begun, or is over."""
        try:
            self._calls.pop()
        except IndexError:
            return False
        return True

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised. Does not block."""
        return self._over.is_open

    def wait(self, timeout_s: float | timedelta | None = None) -> Any:
        """Block until the call is done and return what the synchronous call would have.

        Args:
            timeout_s: None: until the group's own deadline ends the call.

        Raises:
            DeadlineError: Not done after `timeout_s`; the call goes on, and wait() may be called again.
            CollectiveError: What the call raised.
        """
        seconds = Arguments("wait").optional_seconds("timeout_s", timeout_s, may_be_zero=True)
        if not self._over.wait(seconds):
            raise DeadlineError(
                f"The call was not done after {seconds:.1f} s.",
                hint="it goes on: call wait() again, or give it longer",
            )
        if self._error is not None:
            raise self._error
        return self._result


def make_behind(
    queue: CallQueue, core: _core.HostGroup, call: Callable[[float], Any], arrays: object, timeout_s: float
) -> Any:
    """Make a call after those in the queue, all within one deadline; return what it returns.

    Raises:
        DeadlineError: The queue did not finish in time; the call was not begun, and the group stays usable.
    """
    deadline = Deadline(core.timeout_s if timeout_s < 0 else timeout_s)

    def make() -> Any:
        return call(deadline.left_s())

    work = Work(make, arrays)
    queue.submit(work)
    try:
        return work.wait(deadline.left_s())
    except DeadlineError:
        if not work.withdraw():
            return work.wait()  # it has begun, so its own deadline ends it
        raise _not_begun(core, deadline) from None


def _not_begun(core: _core.HostGroup, deadline: Deadline) -> DeadlineError:
    doing = describe_call(core.records()[core.rank]["call"])
    return DeadlineError(
        f"Asynchronous calls made before were not done within {deadline.timeout_s:.1f} s, "
        "so this call could not begin.",
        where=f"rank {core.rank} of {core.world_size}, group {core.name!r}",
        seen=f"this rank's last call: {doing}",
        likely="one of them waits for a rank that is late; the collectives of a group take turns",
        hint="`timeout_s` gives it longer; or call again: this call has left no trace, and the group stays "
        "usable",
        rank=core.rank,
    )


class TransferWork:
    """A message that was started with `async_op=True`. Every call on the group makes progress with it."""

    def __init__(
        self, core: _core.HostGroup, transfer: int, array: object, orphans: list[TransferWork]
    ) -> None:
        self._core = core
        self._transfer: int | None = transfer
        self._array = array  # keeps the memory alive until the transfer is over
        self._orphans = orphans

    @property
    def is_over(self) -> bool:
        return self._transfer is None or self._core.test(self._transfer)

    def wait(self, timeout_s: float | timedelta | None = None) -> None:
        """Block until the message has left (send) or arrived (recv). Raises the error if it failed."""
        seconds = Arguments("wait").optional_seconds("timeout_s", timeout_s, may_be_zero=True)
        self.wait_for(-1.0 if seconds is None else seconds)

    def wait_for(self, limit_s: float) -> None:
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            self._core.wait(transfer, limit_s)

    def __del__(self) -> None:
        # No caller will wait for it any more. If it is still in flight, `orphans` keeps its array alive.
        if self._transfer is not None and not self._core.forget(self._transfer):
            self._orphans.append(self)
            # One by one, because another thread, or the garbage collector, may do the same meanwhile.
            for each in tuple(self._orphans):
                if each._forget():
                    with contextlib.suppress(ValueError):
                        self._orphans.remove(each)

    def _forget(self) -> bool:
        if self._transfer is not None and self._core.forget(self._transfer):
            self._transfer = None
        return self._transfer is None
