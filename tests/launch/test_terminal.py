"""`paceline run` on a terminal: rank 0 has the terminal, and signals of its keys reach the ranks."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.launch.conftest import WITHIN_S, Launcher, seconds_until_gone


class Terminal:
    """A launcher on a terminal of its own."""

    def __init__(self, launcher: Launcher, script: str) -> None:
        launcher.write(script)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "-n", "2", "--grace-s", "20", "script.py"],
            cwd=launcher.folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=os.environ | {"NO_COLOR": "1"},
        )
        os.close(slave)
        self.seen = ""
        self.is_open = True

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, word: str, count: int = 1) -> str:
        """Read until `word` was shown `count` times; return all that was shown so far."""
        deadline = time.monotonic() + WITHIN_S
        while self.seen.count(word) < count:
            ready, _, _ = select.select([self.master], [], [], deadline - time.monotonic())
            assert ready, f"no {word!r} in {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode()
        return self.seen

    def wait(self) -> int:
        return self.process.wait(WITHIN_S)

    def hang_up(self) -> None:
        os.close(self.master)
        self.is_open = False

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(WITHIN_S)
        if self.is_open:
            self.hang_up()


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would inherit that SIGHUP is ignored


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_rank_0_can_ask_and_draw(launcher: Launcher, terminals: list[Terminal]) -> None:
    terminal = Terminal(
        launcher,
        """
        if rank == 0:
            print("size", *os.get_terminal_size(), sys.stderr.isatty())
            print("hello", input("name? "))
        else:
            print("terminal:", sys.stdout.isatty())
        """,
    )
    terminals.append(terminal)
    terminal.read_until("name? ")
    terminal.read_until("[rank 1] terminal: False\r\n")
    terminal.type("you\n")
    seen = terminal.read_until("hello you\r\n")
    assert terminal.wait() == 0
    assert "size 111 33 True\r\n" in seen
    assert "[rank 0]" not in seen


def test_ctrl_c_on_a_terminal_reaches_each_rank_once(launcher: Launcher, terminals: list[Terminal]) -> None:
    terminal = Terminal(
        launcher,
        """
        try:
            print("ready")
            time.sleep(1000)
        except KeyboardInterrupt:
            time.sleep(0.3)  # a second interrupt would break this
            print("interrupted")
        """,
    )
    terminals.append(terminal)
    terminal.read_until("ready", count=2)
    terminal.type("\x03")
    terminal.read_until("interrupted", count=2)
    assert terminal.wait() == 130


def test_ctrl_z_stops_all_and_fg_continues(launcher: Launcher, terminals: list[Terminal]) -> None:
    terminal = Terminal(
        launcher,
        """
        print("ready")
        while not os.path.exists("go"):
            time.sleep(0.02)
        print("went on")
        """,
    )
    terminals.append(terminal)
    terminal.read_until("ready", count=2)
    # The launcher's process group is the only one of its session, and so orphaned: the kernel would ignore a
    # Ctrl-Z of the terminal. The test sends the same signal itself.
    terminal.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    (launcher.folder / "go").touch()
    terminal.process.send_signal(signal.SIGCONT)
    terminal.read_until("went on", count=2)
    assert terminal.wait() == 0


def test_a_terminal_that_closes_ends_the_job(launcher: Launcher, terminals: list[Terminal]) -> None:
    terminal = Terminal(launcher, "print('pid', os.getpid(), '.')\ntime.sleep(1000)")
    terminals.append(terminal)
    seen = terminal.read_until(" .", count=2)
    pids = [int(part.split()[0]) for part in seen.split("pid ")[1:]]
    terminal.hang_up()
    assert terminal.wait() in (128 + signal.SIGHUP, 128 + signal.SIGPIPE)
    seconds_until_gone(pids)
