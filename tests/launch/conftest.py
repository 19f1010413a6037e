"""Real launches of tiny scripts, which import no framework."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Long, because on a busy machine a framework takes a minute to import. Every wait ends as soon as the awaited
# event happens.
WITHIN_S = 240.0


@pytest.fixture(scope="session", autouse=True)
def _compiled_once() -> Iterator[None]:
    """Let the processes of these tests write and share .pyc files, as those of an installed package do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        yield


class Launcher:
    """`paceline run` with pipes as its standard streams, in a folder of its own.

    `python` is its interpreter. A test whose ranks need torch, and in which no process is killed, may set one
    that has imported torch.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = sys.executable
        self._started: list[subprocess.Popen[str]] = []

    def write(self, script: str, name: str = "script.py") -> Path:
        """Write a script that sets `rank` after its imports: the launcher imports torch once for all."""
        path = self.folder / name
        lines = textwrap.dedent(script).strip("\n").splitlines()
        imports = list(itertools.takewhile(lambda line: line.startswith(("import ", "from ")), lines))
        rest = ["rank = int(os.environ['RANK'])", *lines[len(imports) :]]
        path.write_text("\n".join(["import os, signal, sys, time", *imports, *rest, ""]))
        return path

    def start(self, *arguments: str, script: str = "", **options: object) -> subprocess.Popen[str]:
        """Start a launcher. `script` is written to script.py first, if it is given."""
        if script:
            self.write(script)
        process: subprocess.Popen[str] = subprocess.Popen(
            [self.python, "-m", "paceline", "run", *arguments],
            cwd=self.folder,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self._started.append(process)
        return process

    def run(self, *arguments: str, script: str = "", **options: object) -> subprocess.CompletedProcess[str]:
        """Run a launcher to its end."""
        process = self.start(*arguments, script=script, **options)
        stdout, stderr = process.communicate(timeout=WITHIN_S)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def stop_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=WITHIN_S)
            for stream in (process.stdout, process.stderr, process.stdin):
                if stream is not None:
                    stream.close()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.stop_all()


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program that calls `paceline.spawn`."""

    def run(program: str, *arguments: str, is_file: bool = True) -> subprocess.CompletedProcess[str]:
        text = textwrap.dedent(program)
        path = tmp_path / "program.py"
        path.write_text(text)
        # From standard input, as in a REPL or a notebook, there is no file that a rank could import.
        command = [sys.executable, str(path) if is_file else "-", *arguments]
        return subprocess.run(
            command,
            input="" if is_file else text,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            cwd=tmp_path,
        )

    return run


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """The first `count` process ids that ranks print after the word "pid"."""
    assert process.stdout is not None
    pids: list[int] = []
    timer = threading.Timer(2 * WITHIN_S, process.kill)  # a launcher that hangs prints no more lines
    timer.start()
    try:
        for line in process.stdout:
            pids += [int(word) for word in line.partition("pid ")[2].split()]
            if len(pids) == count:
                return pids
    finally:
        timer.cancel()
    raise AssertionError(f"the launcher ended after {len(pids)} of {count} pids")


def seconds_until_gone(pids: list[int]) -> float:
    """Wait until all processes have ended, and return how long that took; fail if one stays."""
    begin = time.monotonic()
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([fd], [], [], WITHIN_S)
        os.close(fd)
        assert ready, f"process {pid} is still there after {WITHIN_S:g} s"
    return time.monotonic() - begin
