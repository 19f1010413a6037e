"""`paceline top` beside a running job, on a real terminal and without one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.launch.conftest import WITHIN_S, Launcher

# Ranks that record as if they trained, without a framework.
RECORDS = """
    import paceline
    from paceline.trace.recording import recording
    from paceline.trace.records import Event, backward_id

    recording.begin_if_asked(rank, 2)
    number = 0
    while not os.path.exists("stop"):
        number += 1
        key = backward_id(0, number)
        recording.note(Event.FORWARD_BEGAN, key, 8 << 1 | 1)
        recording.note(Event.BACKWARD_BEGAN, key, 0)
        recording.note(Event.BACKWARD_ENDED, key, 0)
        recording.note(Event.AVERAGING_ENDED, key, 0)
        paceline.log("loss", 0.5)
        time.sleep(0.01)
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return {**inherited, "TMPDIR": str(folder), "TERM": "xterm-256color", **more}


class Top:
    """`paceline top` in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str, columns: int, **more: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "top", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(folder, **more),
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def read_until(self, pattern: str, count: int = 1) -> str:
        deadline = time.monotonic() + WITHIN_S
        while len(re.findall(pattern, self.seen)) < count:
            ready, _, _ = select.select([self._master], [], [], deadline - time.monotonic())
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode()
        return self.seen

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, and read meanwhile, because a terminal that is not read would block it."""
        while True:
            try:
                self.seen += os.read(self._master, 4096).decode()
            except OSError:  # noqa: PERF203  # the last writer has closed the terminal
                break
        os.close(self._master)
        return self._process.wait(WITHIN_S)


def once(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "top", *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )


def until_recorded(folder: Path, job: subprocess.Popen[str]) -> None:
    """Wait until both ranks have recorded a backward. Their files exist before that."""
    deadline = time.monotonic() + WITHIN_S
    done = None
    while time.monotonic() < deadline and job.poll() is None:
        done = once(folder, "--json")
        if done.returncode == 0:
            steps = [rank["step"] for rank in json.loads(done.stdout)["ranks"]]
            if len(steps) == 2 and None not in steps:
                return
        time.sleep(0.1)
    pytest.fail(f"no backward passes: {done}\n{job.communicate() if job.poll() is not None else ''}")


def test_a_terminal_shows_what_the_ranks_do(launcher: Launcher, monkeypatch) -> None:
    folder = launcher.folder
    monkeypatch.setenv("TMPDIR", str(folder))
    job = launcher.start("-n", "2", "script.py", script=RECORDS)
    until_recorded(folder, job)

    # On a narrow terminal each row fits into 40 columns, and the terminal's screen is restored.
    narrow = Top(folder, columns=40)
    narrow.read_until(r"steps/s", count=2)
    assert narrow.interrupt() == 0
    assert "\x1b[?1049h" in narrow.seen and "\x1b[?1049l" in narrow.seen
    drawn = re.split(r"\r?\n|\x1b\[H", narrow.seen)  # rows, and pictures
    rows = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", row) for row in drawn]
    assert max(map(len, rows)) <= 40
    assert any(row.split() == ["rank", "step", "waits", "for", "memory"] for row in rows)
    assert any(re.fullmatch(r" *1 +\d+ +\d+% +\d* +\d+M *", row) for row in rows)
    assert any("loss 0.5" in row for row in rows)

    # Without a terminal it prints once, without colours.
    piped = once(folder, str(job.pid))
    assert piped.returncode == 0 and "script.py" in piped.stdout and "\x1b" not in piped.stdout

    # A dumb terminal gets one picture below the other, until the job ends.
    dumb = Top(folder, columns=80, TERM="dumb", NO_COLOR="1")
    dumb.read_until(r"steps/s", count=2)
    (folder / "stop").touch()
    dumb.read_until(r"has ended")
    assert dumb.wait() == 0
    assert "\x1b" not in dumb.seen
    job.communicate(timeout=WITHIN_S)
    assert job.returncode == 0

    gone = once(folder)
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "No job of yours is running." in gone.stderr
