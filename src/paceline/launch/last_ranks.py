"""Reports ranks that go on after the others have ended well, and detects when they have hung for too long.

Otherwise a rank that hangs in `destroy_process_group` or at exit would silently keep the job from ending. A
rank that works, such as rank 0 in a last evaluation, is reported as well, but may take as long as it needs:
only time in which it used no processor counts towards the time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.launch.process_tree import cpu_seconds

_REPORTS_AFTER_S = (30.0, 60.0, 120.0, 300.0)  # and every 300 s from then on
_IDLE_SHARE = 0.01  # of one core: less than any evaluation, upload or compilation takes


class LastRanks:
    """Watches the ranks that are left when others have ended without an error.

    As long as most ranks run, ranks that work are not reported: they may have more data.
    """

    def __init__(
        self,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        used: Callable[[Sequence[int]], float] = cpu_seconds,
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._used = used
        self._since: float | None = None  # when a rank last ended; None: all ranks run
        self._is_most = False  # most of the job runs
        self._idle_since = 0.0
        self._was_unread = False  # at the last look
        self._sample = (0.0, 0.0)  # a time, and the processor time used until then
        self._num_reports = 0

    def begin(self, pids: Sequence[int], *, is_most: bool = False) -> None:
        """Call this when another rank has ended; `pids` are left, `is_most`: they are most of the ranks."""
        now = self._now()
        self._since = self._idle_since = now
        self._sample = (now, self._used(pids))
        self._num_reports = 0
        self._is_most = is_most

    def seconds_to_look(self) -> float | None:
        """Seconds until `look` has something to do; None: never, as far as is known."""
        if self._since is None:
            return None
        due = min(self._since + self._next_report_s(), self._idle_since + self._timeout_s)
        return max(0.0, due - self._now())

    def look(self, pids: Sequence[int], *, is_unread: bool = False) -> tuple[float | None, bool]:
        """Check these ranks, if it is time to.

        Args:
            is_unread: Their output is not read, so they may be blocked. The time until the next call then
                does not count as idle, nor does the time since the last call.

        Returns:
            The number of seconds after which to report them, if a report is due now (else None), and whether
            they were idle for the whole time-out. Neither if `pids` is empty, because all ranks have ended.
        """
        if not pids or self._since is None or self.seconds_to_look() != 0.0:
            return None, False
        now, used = self._now(), self._used(pids)
        sampled_at, used_before = self._sample
        if is_unread or self._was_unread or used - used_before > _IDLE_SHARE * (now - sampled_at):
            self._idle_since = now
        self._was_unread = is_unread
        self._sample = (now, used)
        after_s = self._next_report_s()
        is_due = now >= self._since + after_s
        self._num_reports += is_due
        is_report = is_due and (self._idle_since == self._since or not self._is_most)
        return after_s if is_report else None, now >= self._idle_since + self._timeout_s

    def _next_report_s(self) -> float:
        beyond = self._num_reports - len(_REPORTS_AFTER_S)
        return _REPORTS_AFTER_S[self._num_reports] if beyond < 0 else 300.0 * (beyond + 2)
