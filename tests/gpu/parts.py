"""The parts of a check: each is one or several processes, with a deadline of its own and one for all parts.

The one idea: a part that hangs, crashes or fails costs its own time and nothing else. Its processes are ended
with all that they have started, and the parts after it run.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 60
GRACE_S = 5.0
"""For the other ranks of one that has failed, to tell what they saw."""


@dataclass(frozen=True)
class Part:
    """A part of a check.

    Attributes:
        name: In words.
        command: What runs, after the interpreter: ("-m", "pytest", ...).
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
    """What came of a part.

    Attributes:
        part: Which.
        status: "ok", "failed", "out of time" or "absent".
        seconds: How long it ran.
        tail: The last lines that its processes wrote.
    """

    part: Part
    status: str
    seconds: float
    tail: str

    @property
    def is_good(self) -> bool:
        """Whether nothing is to be mended."""
        return self.status in ("ok", "absent")

    @property
    def counts(self) -> str:
        """What pytest counted, in its own words: "7 passed, 1 skipped"; empty: nothing."""
        last = self.tail.splitlines()[-1:] or [""]
        return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)\b", last[0]))


def run_parts(
    parts: Sequence[Part], limit_s: float, say: Callable[[str], None], python: str = sys.executable
) -> list[Ended]:
    """Run parts one after the other; none raises.

    Args:
        parts: What to run, in this order.
        limit_s: Most seconds of all of them; what comes later than that is out of time at once.
        say: Called with a line for each part that has ended.
        python: The interpreter.
    """
    over_s = time.monotonic() + limit_s
    found = []
    for part in parts:
        ended = _run(part, min(part.deadline_s, over_s - time.monotonic()), python)
        found.append(ended)
        note = part.absent or ended.counts
        say(f"{part.name}: {ended.status}{f' ({note})' if note else ''}, {ended.seconds:.0f} s")
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
        log = Path(folder, "log")
        processes = _start(part, python, log)
        try:
            is_in_time = _wait(processes, started_s + limit_s)
        finally:
            _kill(processes)
        status = "ok" if all(process.returncode == 0 for process in processes) else "failed"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    return Ended(part, status if is_in_time else "out of time", time.monotonic() - started_s, tail)


def _start(part: Part, python: str, log: Path) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
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
    with open(log, "ab") as output:
        for rank in range(max(1, part.ranks)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if part.ranks else {}
            processes.append(
                subprocess.Popen(
                    [python, *part.command],
                    cwd=ROOT,
                    env=environment | own,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that it can be ended with all that it has started
                )
            )
    return processes


def _wait(processes: Sequence[subprocess.Popen[bytes]], until_s: float) -> bool:
    """Wait until all have ended well, or one has not; whether that was in time."""
    has_failed = False
    while any(process.poll() is None for process in processes):
        if not has_failed and any(process.poll() for process in processes):
            has_failed = True
            until_s = min(until_s, time.monotonic() + GRACE_S)
        if time.monotonic() > until_s:
            return has_failed  # then it is known why the others have not ended
        time.sleep(0.05)
    return True


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
