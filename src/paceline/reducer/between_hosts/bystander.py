"""A rank of a larger host, which has no share of the buckets: others of its host exchange everything.

The one idea: it does for `hierarchical` what a `HostExchange` does, without partners. It counts its shares,
which are empty, and tells all ranks of a failure.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline import _core
from paceline.health.control_channel import ControlChannel
from paceline.health.failure_messages import pack_failure


class Bystander:
    """A `ShareExchange` of nothing, where other ranks have a `HostExchange`.

    Args:
        core: The part of this host.
        group: The memory of this host, whose other ranks are told of a failure.
        control: Tells all ranks of a failure of one.
        rank: The number of this process.

    Attributes:
        failure: What has ended the backward passes; None: they go on.
    """

    def __init__(
        self, core: _core.HostSums, group: _core.HostGroup, control: ControlChannel, rank: int
    ) -> None:
        self.failure: BaseException | None = None
        self._core, self._group, self._control, self._rank = core, group, control, rank
        control.at_failure(self.give_up)

    def end_backward(self) -> None:
        """Nothing comes to it."""

    def launch(
        self,
        bucket: int,
        note_nonfinite: Callable[[int, range], None],
        make_report: Callable[[], bytes] | None = None,
        *,
        may_wait: bool,
    ) -> bool:
        """Count the share, which is empty; others of this host read its report where it is."""
        self._core.count_share()
        return True

    def give_up(self, error: BaseException) -> None:
        """This rank has failed, or another one: tell whoever does not know. Does not block."""
        if self.failure is None:
            self.failure = error
            self._group.abort(pack_failure(error, self._rank))
            self._control.tell(error)

    def stop(self) -> None:
        """Nothing is under way."""

    def join(self) -> None:
        """Nothing is under way."""
