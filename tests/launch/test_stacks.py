"""`paceline stacks` shows the stacks of another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import stacks
from paceline.errors import ConfigError

PROGRAM = """
import signal, threading
from paceline import stacks
if "own" in __import__("sys").argv:
    signal.signal(signal.SIGUSR2, lambda *_: None)
print(stacks.answer_requests(), stacks.answer_requests(), flush=True)
lock = threading.Lock()
lock.acquire()
def stuck_here():
    lock.acquire()
stuck_here()
"""


BUSY_WITH_FILES = """
import threading
from paceline import stacks
below = [open("/dev/null") for _ in range(20)]
stacks.answer_requests()
for file in below:
    file.close()
def open_and_close():
    while True:
        for file in [open("/dev/null") for _ in range(20)]:
            file.close()
threading.Thread(target=open_and_close, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def stuck(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that hangs in a lock, and first prints whether it answers requests."""
    command = [sys.executable, "-c", PROGRAM, *getattr(request, "param", ())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_stuck_process_answers_as_often_as_asked(stuck: subprocess.Popen[str]) -> None:
    assert stuck.stdout is not None
    assert stuck.stdout.readline() == "True True\n"
    while "in stuck_here" not in stacks.ask(stuck.pid, timeout_s=60):
        pass  # it has printed that it is ready, but has not reached the lock yet
    assert stacks.ask(stuck.pid, timeout_s=60).count("in stuck_here") == 1
    assert stuck.poll() is None


def test_a_process_that_opens_and_closes_files_answers() -> None:
    command = [sys.executable, "-c", BUSY_WITH_FILES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            for _ in range(20):
                assert stacks.ask_if_ready(process.pid, timeout_s=60) is not None
        finally:
            process.kill()


@pytest.mark.parametrize("stuck", [["own"]], indirect=True)
def test_a_program_with_its_own_use_of_the_signal_is_left_alone(
    stuck: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stuck.stdout is not None
    assert stuck.stdout.readline() == "False False\n"
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="cannot be asked"):
        stacks.ask(stuck.pid)
    assert stuck.poll() is None


@pytest.mark.parametrize("stuck", [["own"]], indirect=True)
def test_the_cause_of_an_error_of_py_spy_is_reported_without_its_backtrace(
    stuck: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stuck.stdout is not None
    stuck.stdout.readline()
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nprintf 'Error: Permission Denied\\n\\nStack backtrace:\\n' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="could not read process") as caught:
        stacks.ask(stuck.pid)
    assert caught.value.got == "Error: Permission Denied"


def test_a_process_may_have_any_bytes_for_a_name() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) T\\xfe', 0, 0, 0)"
    command = [sys.executable, "-c", f"{rename}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert stacks.process_state(process.pid) in ("S", "R")
        process.send_signal(signal.SIGSTOP)
        while stacks.process_state(process.pid) not in stacks.STOPPED:
            assert process.poll() is None
        process.kill()
    assert stacks.process_state(process.pid) == ""


def test_a_stopped_process_is_reported(stuck: subprocess.Popen[str]) -> None:
    assert stuck.stdout is not None
    stuck.stdout.readline()
    stuck.send_signal(signal.SIGSTOP)
    os.waitpid(stuck.pid, os.WUNTRACED)
    with pytest.raises(ConfigError, match="is stopped"):
        stacks.ask(stuck.pid)


def test_a_process_that_is_not_there() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(ConfigError, match="no process"):
        stacks.ask(process.pid)
