"""A warm Python behaves as a Python does, and ends as it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.warm import warm_python

pytest.importorskip("torch")


@pytest.fixture
def python() -> str:
    return warm_python("torch")


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_it_has_imported_the_framework_and_gets_all_that_a_program_gets(python: str, tmp_path: Path) -> None:
    program = "import os, sys; print(sys.argv, sys.executable, os.environ['ASKED'], os.getcwd(), input())"
    asked = {**os.environ, "ASKED": "yes"}
    done = run(
        python,
        "-u",
        "-c",
        f"{program}; print('torch' in sys.modules)",
        "a",
        input="said",
        env=asked,
        cwd=tmp_path,
    )
    assert done.stdout == f"['-c', 'a'] {python} yes {tmp_path} said\nTrue\n", done.stderr


def test_it_runs_scripts_and_modules_as_main(python: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("value = 7")
    script.write_text("import beside, sys; print(__name__, beside.value, sys.argv[1:])")
    said = "__main__ 7 ['x']\n"
    assert run(python, str(script), "x").stdout == said
    assert run(python, "-m", "script", "x", cwd=tmp_path).stdout == said


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("raise ValueError('wrong')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_it_ends_as_the_program_does(python: str, program: str, status: int) -> None:
    done = run(python, "-c", program)
    assert done.returncode == status
    assert ("ValueError: wrong" in done.stderr) == ("ValueError" in program)


def test_what_runs_at_the_end_of_a_python_runs(python: str) -> None:
    program = """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.01), print("thread"))).start()
"""
    assert run(python, "-c", program).stdout == "thread\nat exit\n"


def test_signals_reach_it_and_inherited_files_are_open(python: str) -> None:
    ours, theirs = os.pipe()
    program = f"import os, time; os.write({theirs}, b'!'); time.sleep(100)"
    with subprocess.Popen([python, "-c", program], pass_fds=[theirs]) as process:
        assert os.read(ours, 1) == b"!"
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    os.close(ours)
    os.close(theirs)


def test_it_dies_with_the_process_that_was_started(python: str) -> None:
    # One write each: the output of two processes may mix.
    program = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)"
    with subprocess.Popen([python, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
    for fd in found:
        assert select.select([fd], [], [], 60)[0]
        os.close(fd)


def test_what_it_starts_is_warm_as_well(python: str) -> None:
    child = "import sys; print('torch' in sys.modules)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run(python, "-c", program).stdout == "True\n"
    assert python != sys.executable
