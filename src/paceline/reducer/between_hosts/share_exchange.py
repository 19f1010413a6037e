"""What a hierarchical reducer hands the sums of its host's shares to, whoever exchanges them.

Two classes satisfy it: `HostExchange`, which has partners on the other hosts, and `Bystander`, on a rank that
has no share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class ShareExchange(Protocol):
    """Carries the sums of one rank's shares to the other hosts and back, one backward after the other."""

    @property
    def failure(self) -> BaseException | None:
        """What has ended the backward passes; None: they go on."""
        ...

    def launch(
        self,
        bucket: int,
        note_nonfinite: Callable[[int, range], None],
        make_report: Callable[[], bytes] | None = None,
        *,
        may_wait: bool,
    ) -> bool:
        """Sum this rank's share of a bucket that all ranks of the host have posted, and begin to exchange it.

        Args:
            bucket: In the plan's order, from 0 in each backward.
            note_nonfinite: Called with (bucket, elements) if a gradient there is not finite.
            make_report: What travels beside the last bucket, called once its share is summed.
            may_wait: Wait until there is memory for it, at most until the deadline.

        Returns:
            Whether it was launched: False where there is no memory now.

        Raises:
            CollectiveError: The exchange has failed, or there was no memory in time.
        """
        ...

    def end_backward(self) -> None:
        """All means are there; the next backward may begin."""
        ...

    def give_up(self, error: BaseException) -> None:
        """This rank has failed: tell all others, and end what is under way. Does not block."""
        ...

    def stop(self) -> None:
        """End once there is nothing more to do. Does not block."""
        ...

    def join(self) -> None:
        """Wait until it has ended, and the memory of this host is not written any more."""
        ...
