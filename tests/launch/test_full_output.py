"""The job trains on if the launcher's output is not read, or if the disk behind it is full."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.warm import warm_python
from tests.launch.conftest import WITHIN_S, Launcher, read_pids, seconds_until_gone

Start = Callable[..., subprocess.Popen[str]]
TRAINS = "print('hello', flush=True)\nopen(f'trained{rank}', 'w').close()"


class Unread:
    """A pipe that is full, and that no process reads for now."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 4096)
        self._num_bytes = os.write(self.writer, b"." * 4096)

    def read(self) -> str:
        """All that was written to it, once the last writer has ended."""
        os.close(self.writer)
        with open(self.reader) as file:
            self.reader = self.writer = -1
            return file.read()[self._num_bytes :]

    def close(self) -> None:
        for fd in (self.reader, self.writer):
            if fd >= 0:
                os.close(fd)


@pytest.fixture
def unread() -> Iterator[Unread]:
    pipe = Unread()
    yield pipe
    pipe.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def hosts_options() -> tuple[str, ...]:
    """Options of a launch as on several hosts, which prints the address of its dashboard."""
    return ("--nnodes", "1", "--rdzv", f"127.0.0.1:{free_port()}", "--dashboard")


@pytest.fixture
def start(launcher: Launcher) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launcher; streams that are not given are pipes."""
    started = []

    def start(
        *options: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        # With --nnodes, torch's agent starts the ranks.
        python = warm_python("torch") if "--nnodes" in options else launcher.python
        process = subprocess.Popen(
            [python, "-m", "paceline", "run", *options],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            cwd=launcher.folder,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()  # its ranks end with it
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def assert_trained(folder: Path) -> None:
    assert (folder / "trained0").exists() and (folder / "trained1").exists()


def test_unread_standard_error_does_not_hold_a_job_of_several_hosts(
    launcher: Launcher, start: Start, unread: Unread
) -> None:
    launcher.write(TRAINS)
    process = start("-n", "2", *hosts_options(), "script.py", stderr=unread.writer)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
    assert_trained(launcher.folder)


@pytest.mark.parametrize("many_hosts", [True, False])
def test_a_full_disk_behind_standard_error_does_not_end_the_job(
    launcher: Launcher, start: Start, many_hosts: bool
) -> None:
    """Nor does the warning before ranks start, of an option that follows the script."""
    launcher.write(TRAINS)
    options = ("-n", "2", *hosts_options()) if many_hosts else ("-n", "2", "--dashboard")
    with open("/dev/full", "w") as full:
        for words in ((*options, "script.py"), ("script.py", "-n", "2")):
            process = start(*words, stderr=full.fileno())
            process.communicate(timeout=WITHIN_S)
            assert process.returncode == 0
    assert_trained(launcher.folder)


def test_standard_error_that_is_read_late_keeps_its_lines(
    launcher: Launcher, start: Start, unread: Unread
) -> None:
    """The ranks train to their end, and standard output is shown; then the launcher waits for the reader."""
    launcher.write(f"{TRAINS}\nprint('of rank', rank, file=sys.stderr)")
    process = start("-n", "2", "--dashboard", "script.py", stderr=unread.writer)
    assert process.stdout is not None
    shown = sorted(process.stdout.readline() for _ in range(2))
    assert shown == ["[rank 0] hello\n", "[rank 1] hello\n"]
    said = unread.read()
    assert process.wait(WITHIN_S) == 0
    assert_trained(launcher.folder)
    assert "the dashboard is at" in said
    assert "[rank 0] of rank 0\n" in said and "[rank 1] of rank 1\n" in said


def test_lines_stay_whole_on_one_pipe_that_is_read_late(
    launcher: Launcher, start: Start, unread: Unread
) -> None:
    launcher.write(
        """
        for i in range(200):
            print(f"out {rank} " + "x" * 300, flush=True)
            print(f"err {rank} " + "x" * 300, file=sys.stderr, flush=True)
        """
    )
    process = start("-n", "2", "script.py", stdout=unread.writer, stderr=unread.writer)
    lines = unread.read().splitlines()
    assert process.wait(WITHIN_S) == 0
    expected = [f"[rank {rank}] {kind} {rank} " + "x" * 300 for rank in (0, 1) for kind in ("out", "err")]
    assert sorted(lines) == sorted(expected * 200)


def test_sigterm_ends_a_job_whose_output_is_not_read(
    launcher: Launcher, start: Start, unread: Unread
) -> None:
    launcher.write(
        "print('pid', os.getpid(), flush=True)\nprint('x' * 300, file=sys.stderr)\ntime.sleep(1000)"
    )
    process = start("-n", "2", "--grace-s", "1", "--dashboard", "script.py", stderr=unread.writer)
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert seconds_until_gone(pids) < WITHIN_S


def test_a_rank_that_waits_for_the_reader_has_not_hung(
    launcher: Launcher, start: Start, unread: Unread
) -> None:
    """The launcher reports that it waits for the reader, and exits with 0 when its output has been read."""
    launcher.write("for _ in range(1000 * rank):\n    print('x' * 300, flush=True)")
    process = start("-n", "2", "--exit-timeout-s", "1", "script.py", stdout=unread.writer)
    assert process.stderr is not None
    said = next(line for line in process.stderr if "sending" in line or "has not been read" in line)
    assert "standard output has not been read" in said
    assert unread.read() == ("[rank 1] " + "x" * 300 + "\n") * 1000
    _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, said
