"""Reads the stacks of the Python threads of another process, even while it is stuck in a lock or in C.

A process that is ready to answer owns an anonymous memory file named `paceline-stacks`, into which
faulthandler writes its stacks on SIGUSR2. A process that finds this file in /proc knows that the signal is
safe to send, and reads the answer from the file. No socket listens, and nothing is on disk.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from paceline.errors import ConfigError

_FILE_NAME = "paceline-stacks"
_SIGNAL = signal.SIGUSR2
STOPPED = ("T", "t")  # of `process_state`: by a signal, or by a debugger
_answers: int | None = None  # this process's own file, once there is one; never closed


def answer_requests() -> bool:
    """Make this process answer `paceline stacks`; may be called repeatedly.

    Returns:
        False if the program uses SIGUSR2 itself, whose handler is then left alone, or if no memory file can
        be made (no memfd_create, no free descriptor).
    """
    global _answers
    if _answers is None and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        try:
            _answers = os.memfd_create(_FILE_NAME)
        except OSError:
            return False
        fcntl.fcntl(_answers, fcntl.F_SETFL, os.O_APPEND)  # forked children share the file
        faulthandler.register(_SIGNAL, file=_answers, all_threads=True, chain=False)
    return _answers is not None


def ask(pid: int, timeout_s: float = 5.0) -> str:
    """The stacks of all Python threads of a process, innermost call first.

    A process that does not answer is read with py-spy, if that is installed.
    """
    state = process_state(pid)
    if not state:
        raise ConfigError(
            f"There is no process {pid}.", hint="errors and reports show the pids of ranks", pid=pid
        )
    if state in STOPPED:
        raise ConfigError(
            f"Process {pid} is stopped, so it cannot answer.",
            hint=f"`kill -CONT {pid}` lets it go on",
            pid=pid,
        )
    answer = ask_if_ready(pid, timeout_s)
    return _ask_py_spy(pid) if answer is None else answer


def ask_if_ready(pid: int, timeout_s: float = 5.0) -> str | None:
    try:
        answers = _find_answers(Path(f"/proc/{pid}"))
        if answers is None or process_state(pid) in STOPPED:
            return None
        with answers.open("r+b", buffering=0) as file:
            begin = os.fstat(file.fileno()).st_size
            os.kill(pid, _SIGNAL)
            if not _is_written(file.fileno(), begin, timeout_s):
                return None
            file.seek(begin)
            text = file.read().decode(errors="replace")
            file.truncate(begin)  # so that the file does not grow with each request
    except OSError:  # it ended, closed a file, or is another user's
        return None
    return text


def _find_answers(folder: Path) -> Path | None:
    for fd in (folder / "fd").iterdir():
        try:
            is_found = os.readlink(fd).startswith(f"/memfd:{_FILE_NAME} ")
        except FileNotFoundError:  # the process has just closed it
            continue
        if is_found:
            return fd if _catches_signal(folder) else None
    return None


def _catches_signal(folder: Path) -> bool:
    for line in (folder / "status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process; "" if /proc shows no such process."""
    try:
        # The name of the program, in brackets, may contain any bytes.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _is_written(fd: int, begin: int, timeout_s: float) -> bool:
    """Wait until the file stops growing, because faulthandler makes many small writes."""
    deadline = time.monotonic() + timeout_s
    size = begin
    while time.monotonic() < deadline:
        time.sleep(0.05)
        previous, size = size, os.fstat(fd).st_size
        if size == previous > begin:
            return True
    return False


def _ask_py_spy(pid: int) -> str:
    if shutil.which("py-spy") is None:
        raise ConfigError(
            f"Process {pid} cannot be asked for its stacks.",
            likely="it has not joined a group yet, is no Python process or another user's, uses SIGUSR2 "
            "itself, or waits in the kernel for a file",
            hint="pip install py-spy; `paceline stacks` then asks any Python process",
            pid=pid,
        )
    done = subprocess.run(["py-spy", "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ConfigError(
            f"py-spy could not read process {pid}.",
            got=done.stderr.strip().partition("\n")[0],  # below it is a backtrace of py-spy's own
            hint="in a container it needs the capability SYS_PTRACE",
            pid=pid,
        )
    return done.stdout
