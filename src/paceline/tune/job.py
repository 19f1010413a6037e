"""One layout as a job of `paceline run` that is started, stopped for a while, resumed, and ended.

Only the ranks and the processes that they started are stopped (SIGSTOP); their launcher goes on. So the
launcher still ends them if this process is killed, and its SIGTERM wakes stopped ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.process_tree import descendants, die_with_parent, send, wait_readable
from paceline.launch.rank_process import python_command
from paceline.launch.tune_answers import Layout
from paceline.trace.ring_file import (
    BATCHES_VARIABLE,
    CAPACITY_VARIABLE,
    FOLDER_VARIABLE,
    RankRecording,
    read_folder,
)

_GRACE_S = 1.0
_ENDS_WITHIN_S = 15.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Job:
    """A job that is started at once, with its output in a file.

    Args:
        layout: Ranks, and threads of each.
        options: Further options of `paceline run`.
        command: The script or module and its arguments.
        folder: An empty folder for its recordings and its output.
        environment: The variables that it inherits.
    """

    def __init__(
        self,
        layout: Layout,
        options: Sequence[str],
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
    ) -> None:
        self.layout = layout
        self._folder = folder
        self._output = folder / "output"
        parent = os.getpid()
        variables = {name: value for name, value in environment.items() if name != CAPACITY_VARIABLE}
        with self._output.open("wb") as output:
            self._launcher = subprocess.Popen(
                [
                    *python_command("from paceline.cli import main; sys.exit(main())"),
                    "run",
                    *("-n", str(layout.ranks), "--threads", str(layout.threads)),
                    *("--grace-s", str(_GRACE_S), "--preempt-s", str(_GRACE_S), "--prefix", "never"),
                    *options,
                    *command,
                ],
                env={**variables, FOLDER_VARIABLE: str(folder), BATCHES_VARIABLE: "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C interrupts this process only
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
            )
        self._end = os.pidfd_open(self._launcher.pid)
        self._stopped: list[int] = []

    def has_ended_within(self, seconds: float) -> bool:
        """Wait for the end of the job, for `seconds` at most; returns whether it has ended."""
        return bool(wait_readable([self._end], seconds))

    @property
    def exit_status(self) -> int | None:
        """The exit status of `paceline run`; None while it runs."""
        return self._launcher.poll()

    def recordings(self) -> list[RankRecording]:
        """What its ranks have recorded so far."""
        return read_folder(self._folder)

    def output(self, most_lines: int = 40) -> str:
        """The last lines of its output."""
        text = self._output.read_text(errors="replace")
        return "\n".join(text.splitlines()[-most_lines:])

    def pause(self) -> None:
        """Stop its ranks, and all processes that they have started, until `resume`."""
        seen: set[int] = set()
        while found := [pid for pid in self._below_launcher() if pid not in seen]:
            for pid in found:  # a process that is just being started is found in the next round
                send(pid, signal.SIGSTOP)
            seen.update(found)
        self._stopped = list(seen)

    def resume(self) -> None:
        """Let the stopped processes go on."""
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped = []

    def memory_bytes(self) -> int:
        """The memory of its ranks that is not shared."""
        return sum(map(_private_bytes, self._below_launcher()))

    def ask_to_end(self) -> None:
        """Ask the launcher to end its ranks; returns at once."""
        if self.exit_status is None:
            send(self._launcher.pid, signal.SIGTERM)
            self.resume()  # the launcher wakes its ranks, but not the processes that they have started

    def wait_for_end(self) -> None:
        """Wait until no process of the job is left, after `ask_to_end`; may be called again."""
        if self._end < 0:
            return
        if not self.has_ended_within(_ENDS_WITHIN_S):
            # The supervisor below it then ends all the others: guardian.py.
            self._launcher.kill()
        self._launcher.wait()
        os.close(self._end)
        self._end = -1

    def _below_launcher(self) -> list[int]:
        """The ranks and the processes that they have started, but not the supervisor."""
        return [pid for supervisor in descendants(self._launcher.pid)[:1] for pid in descendants(supervisor)]


def _private_bytes(pid: int) -> int:
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):  # it has ended
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES
