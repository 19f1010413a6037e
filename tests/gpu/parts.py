"""The parts of a check: each is one or several processes, with its own deadline and one for all parts.

A part that hangs, crashes or fails costs its own time and nothing else: its processes and their children are
ended, and the next part runs. Of several ranks, the one that died first is named, with its signal or exit
status, and its own output is shown.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 5.0
"""For the other ranks after a failure, to print their errors."""
_TOGETHER_S = 0.1
"""Two ranks that end within this time may have ended in either order."""
_DUMP_S = 3.0
"""For the stacks of a process that is out of time."""
_BEFORE, _FIRST, _LAST = 5, 45, 15
"""Lines that are shown of a failed process: before its error, of it, and its last ones."""
_ERROR = re.compile(r"Traceback \(most recent call last\)|=+ (?:FAILURES|ERRORS) =+$")


@dataclass(frozen=True)
class Part:
    """A part of a check.

    Attributes:
        name: In words.
        command: The command, after the interpreter: ("-m", "pytest", ...).
        deadline_s: Most seconds that it may take.
        ranks: How many processes run it, as the ranks of one host; 0: one process that is no rank.
        absent: Why it does not run here; empty: it does.
        result: The file that it writes if all goes well; None: it writes none.
    """

    name: str
    command: tuple[str, ...]
    deadline_s: float
    ranks: int = 0
    absent: str = ""
    result: Path | None = None


@dataclass(frozen=True)
class Ended:
    """The result of a part.

    Attributes:
        part: The part.
        status: "ok", "failed", "out of time" or "absent".
        seconds: How long it ran.
        tail: The last lines that its processes wrote; of one that failed, the error of the culprit.
        culprit: The rank that died first, and how; empty: none failed.
    """

    part: Part
    status: str
    seconds: float
    tail: str
    culprit: str = ""

    @property
    def is_good(self) -> bool:
        """True if nothing failed."""
        return self.status in ("ok", "absent")

    @property
    def counts(self) -> str:
        """pytest's own summary: "7 passed, 1 skipped"; empty: none."""
        last = self.tail.splitlines()[-1:] or [""]
        return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", last[0]))

    @property
    def summary(self) -> str:
        """One line on it, without the name."""
        words = [self.part.absent or self.counts, self.culprit]
        return f"{', '.join(word for word in (self.status, *words) if word)}, {self.seconds:.0f} s"


def run_parts(
    parts: Sequence[Part], limit_s: float, say: Callable[[str], None], python: str = sys.executable
) -> list[Ended]:
    """Run parts one after the other; none raises.

    Args:
        parts: The parts, in this order.
        limit_s: Most seconds of all of them; later parts are out of time at once.
        say: Called with a line for each part that has ended.
        python: The interpreter.
    """
    over_s = time.monotonic() + limit_s
    found = []
    for part in parts:
        ended = _run(part, min(part.deadline_s, over_s - time.monotonic()), python)
        found.append(ended)
        say(f"{part.name}: {ended.summary}")
        if not ended.is_good:
            say(ended.tail)
    return found


def _run(part: Part, limit_s: float, python: str) -> Ended:
    if part.absent:
        return Ended(part, "absent", 0.0, "")
    if limit_s <= 0:
        return Ended(part, "out of time", 0.0, "the parts before it have taken all the time")
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(max(1, part.ranks))]
        processes = _start(part, python, logs)
        try:
            first = _wait(processes, started_s + limit_s)
            is_late = first is None and any(process.returncode is None for process in processes)
            if is_late:
                first = _dump_stacks(processes)
        finally:
            _kill(processes)
        outputs = [log.read_text(errors="replace") for log in logs]
    seconds = time.monotonic() - started_s
    if first is None:
        lines = "".join(outputs).splitlines()
        return Ended(part, "ok", seconds, "\n".join(lines[-_LAST:]))
    rank = f"rank {first} of {part.ranks}" if part.ranks else "it"
    how = f"had not ended after {limit_s:.0f} s" if is_late else _how(processes[first].returncode)
    status = "out of time" if is_late else "failed"
    return Ended(part, status, seconds, error_in(outputs[first]), f"{rank} {how}")


def error_in(output: str) -> str:
    """The failure in a process's output: the stack of a crash or the first error; and the last lines."""
    lines = [line for line in output.splitlines() if not line.startswith("Extension modules: ")]
    crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error: ")), None)
    if crash is not None:
        lines = _current_thread_first(lines, crash)
    found = (at for at, line in enumerate(lines) if _ERROR.search(line))
    begin = next(found, len(lines)) if crash is None else crash
    until = begin + _FIRST
    left_out = len(lines) - _LAST - until
    if left_out > 1:
        lines = [*lines[:until], f"... {left_out} lines ...", *lines[-_LAST:]]
    return "\n".join(lines[max(0, min(begin - _BEFORE, len(lines) - _LAST)) :])


def _current_thread_first(lines: list[str], crash: int) -> list[str]:
    """faulthandler lists all threads; the one that crashed may be far below."""
    begin = next((at for at in range(crash, len(lines)) if lines[at].startswith("Current thread ")), None)
    if begin is None:
        return lines
    end = next((at for at in range(begin, len(lines)) if not lines[at].strip()), len(lines))
    stack = lines[begin:end]
    return [*lines[: crash + 1], *stack, *lines[crash + 1 : begin], *lines[end:]]


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"died of signal {-status}"


def _start(part: Part, python: str, logs: Sequence[Path]) -> list[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if part.ranks:
        environment |= {
            "WORLD_SIZE": str(part.ranks),
            "LOCAL_WORLD_SIZE": str(part.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "PACELINE_JOB_ID": f"gpu-check-{os.getpid()}-{time.monotonic_ns()}",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    processes = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if part.ranks else {}
        with open(log, "wb") as output:
            processes.append(
                subprocess.Popen(
                    [python, *part.command],
                    cwd=ROOT,
                    env=environment | own,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that it can be ended with all its children
                )
            )
    return processes


def _wait(processes: Sequence[subprocess.Popen[bytes]], until_s: float) -> int | None:
    """Wait until all have ended or time is over; after a failure, GRACE_S for the others.

    Returns:
        The rank that failed first; None: none has.
    """
    ends: queue.SimpleQueue[int] = queue.SimpleQueue()

    def watch(rank: int) -> None:
        processes[rank].wait()
        ends.put(rank)

    for rank in range(len(processes)):
        threading.Thread(target=watch, args=(rank,), daemon=True).start()
    failed: list[tuple[float, int]] = []
    for _ in processes:
        try:
            rank = ends.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            break
        if processes[rank].returncode != 0:
            if not failed:
                until_s = min(until_s, time.monotonic() + GRACE_S)
            failed.append((time.monotonic(), rank))
    together = [rank for at_s, rank in failed if at_s <= failed[0][0] + _TOGETHER_S]
    # A crash makes other ranks raise; an error seldom makes another one crash.
    return min(together, key=lambda rank: processes[rank].returncode >= 0, default=None)


def _dump_stacks(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Make late ranks write their stacks (faulthandler's, at SIGABRT); return the first of them."""
    late = [rank for rank, process in enumerate(processes) if process.returncode is None]
    for rank in late:
        processes[rank].send_signal(signal.SIGABRT)
    until_s = time.monotonic() + _DUMP_S
    for rank in late:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[rank].wait(max(0.0, until_s - time.monotonic()))
    return late[0]


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
