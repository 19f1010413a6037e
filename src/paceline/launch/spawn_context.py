"""Ranks that `spawn` started, seen from the process that called it.

The guardian reports over a pipe, in lines of JSON. The end of the pipe means that every rank has ended.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from datetime import timedelta

from paceline.arguments import Arguments
from paceline.errors import LaunchError, format_ranks
from paceline.launch import failure_report
from paceline.launch.notebook_cells import with_cell_names
from paceline.launch.plan import Plan
from paceline.launch.process_tree import wait_readable

_STARTED_WITHIN_S = 60.0
_ENDED_WITHIN_S = 20.0  # after the lifeline is closed


class SpawnContext:
    def __init__(
        self,
        plan: Plan,
        guardian: subprocess.Popen[bytes],
        report_fd: int,
        lifeline: int,
        relays: list[threading.Thread],
        *,
        is_daemon: bool,
    ) -> None:
        self._plan = plan
        self._guardian = guardian
        self._report_fd = report_fd
        self._lifeline = lifeline  # the guardian ends the job when this is closed, or this process dies
        self._relays = relays
        self._received = b""
        self._is_over = False
        self._at_exit = self.stop if is_daemon else self.join
        atexit.register(self._at_exit)

    def pids(self) -> list[int]:
        """Process ids of the ranks, by rank. Blocks until they are started.

        Raises:
            LaunchError: They could not be started.
        """
        deadline = time.monotonic() + _STARTED_WITHIN_S
        while b"\n" not in self._received:
            if not self._receive(deadline):
                raise LaunchError(
                    "The ranks were not started.",
                    seen=f"no word from the launcher (pid {self._guardian.pid}) in {_STARTED_WITHIN_S:g} s",
                )
        pids: list[int] = json.loads(self._received.splitlines()[0])["pids"]
        return pids

    def join(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until every rank has finished.

        Args:
            timeout: Seconds to wait, or a timedelta; None: wait without a limit.

        Returns:
            True if all have finished, False if some still run after `timeout`.

        Raises:
            LaunchError: A rank failed; the others have been stopped.
        """
        seconds = Arguments("join").optional_seconds("timeout", timeout, may_be_zero=True)
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._is_over:
            if not self._receive(deadline) and not self._is_over:
                return False
        self._raise_for_failure()
        return True

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Stop the ranks that still run, and wait until they have ended.

        Args:
            signum: The first signal; SIGTERM and SIGKILL follow, each after a grace period.
        """
        if self._is_over:
            return
        self._guardian.send_signal(signum)
        # SIGINT, then SIGTERM, then SIGKILL, each after a grace period; then the lifeline is closed.
        deadline = time.monotonic() + 3 * self._plan.options.grace_s + 10.0
        while not self._is_over and self._receive(deadline):
            pass
        self._end()

    def _receive(self, deadline: float | None) -> bool:
        if self._is_over:
            return False
        if not wait_readable([self._report_fd], None if deadline is None else deadline - time.monotonic()):
            return False
        data = os.read(self._report_fd, 1 << 16)
        self._received += data
        if not data:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        atexit.unregister(self._at_exit)
        os.close(self._lifeline)
        os.close(self._report_fd)
        try:
            self._guardian.wait(_ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:  # the guardian is stopped (SIGSTOP)
            self._guardian.kill()
            self._guardian.wait()
        for relay in self._relays:
            relay.join()

    def _raise_for_failure(self) -> None:
        lines = self._received.splitlines()
        result = json.loads(lines[-1]) if len(lines) > 1 else {}
        ends = [failure_report.from_json(end) for end in result.get("ends", ())]
        if result.get("is_failure"):
            ends = [replace(end, output=with_cell_names(end.output)) for end in ends]
            raise failure_report.launch_error(ends, self._plan.name)
        if result.get("exit_status") == 0:
            return
        status = result.get("exit_status", self._guardian.returncode)
        options, summary = self._plan.options, "The job was stopped before it ended."
        if status == failure_report.TIMED_OUT:
            stopped = format_ranks(end.rank for end in ends if end.stopped_by).capitalize()
            summary = f"{stopped} of {self._plan.nprocs} did not end after all others, and hung."
            if options.timeout_s is not None and not any(end.status == 0 for end in ends):
                summary = f"The job did not end within {options.timeout_s:g} s and was stopped."
        raise LaunchError(
            summary,
            where=f"{self._plan.name} on {self._plan.nprocs} ranks",
            got=f"exit status {status} of its launcher (pid {self._guardian.pid})",
            exit_status=status,
            failures=(),
        )
