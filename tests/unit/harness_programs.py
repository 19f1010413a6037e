"""Programs for one rank that fail in every way that the harness must notice, and a few that do not fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.harness.rank_main import after_test, use_up


def square(rank: int, offset: int = 0) -> int:
    return rank * rank + offset


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def frameworks(rank: int) -> list[str]:
    return [name for name in ("torch", "paddle") if name in sys.modules]


def import_paddle(rank: int) -> str:
    import paddle

    return str(paddle.get_device())


def large(rank: int) -> bytes:
    return bytes([rank]) * 10_000_000


def fail_on_last(rank: int, world_size: int) -> None:
    answer = 41 + rank
    if rank == world_size - 1:
        print("about to fail")
        assert answer == 42


def kill_myself(rank: int, victim: int, signum: int) -> None:
    if rank == victim:
        os.kill(os.getpid(), signum)


def leave_early(rank: int) -> None:
    if rank == 1:
        os._exit(0)


def exit_with(rank: int, status: int) -> None:
    if rank == 1:
        os._exit(status)


def system_exit(rank: int) -> None:
    sys.exit(0)


def skip(rank: int) -> None:
    pytest.skip("too late")


def raise_value_error(rank: int) -> None:
    raise ValueError(f"rank {rank}")


def hang_on_one(rank: int) -> None:
    if rank == 1:
        the_line_where_it_hangs()


def the_line_where_it_hangs() -> None:
    time.sleep(1000)


def stop_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_a_failed_peer(rank: int) -> None:
    if rank == 0:
        raise RuntimeError("the culprit")
    time.sleep(1000)


def unpicklable(rank: int) -> Any:
    return lambda: rank


def warn(rank: int) -> None:
    import warnings

    warnings.warn("an old thing", DeprecationWarning, stacklevel=1)


def leave_shared_memory(rank: int, name: str) -> None:
    if rank == 0:
        Path("/dev/shm", name).write_bytes(b"left")


def leave_process(rank: int) -> None:
    if rank == 1:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])


def leave_socket(rank: int) -> None:
    import tempfile

    if rank == 0:
        Path(tempfile.gettempdir(), "paceline-left").touch()


def report_pid_and_sleep(rank: int, folder: Path) -> None:
    Path(folder, f"{rank}.partial").write_text(str(os.getpid()))
    Path(folder, f"{rank}.partial").rename(Path(folder, f"{rank}.pid"))
    time.sleep(1000)


def pid_of_the_server(rank: int) -> int:
    return os.getppid()


def outputs_of_the_server(rank: int) -> list[str]:
    """The destinations of its standard output and standard error."""
    return [os.readlink(f"/proc/{os.getppid()}/fd/{number}") for number in (1, 2)]


def files_imported_before(rank: int) -> list[str]:
    return [name for name in sys.modules if name.startswith("tests.multiprocess.")]


def meet_another_run(rank: int, folder: str, own: str, other: str) -> str:
    """Return only while another run does the same."""
    (Path(folder) / own).touch()
    while not (Path(folder) / other).exists():
        time.sleep(0.01)
    return own


def change_process(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, float]:
    """Its process, job and folder, and a random number; and changes of all kinds to the process."""
    found = os.getpid(), f"{os.environ['PACELINE_JOB_ID']} {os.environ['TMPDIR']}", numpy.random.random()
    assert "CHANGED" not in os.environ and not _notes and square(2) == 4
    os.environ["CHANGED"] = "yes"
    monkeypatch.setitem(globals(), "square", lambda rank: 0)
    _notes.append("changed")
    after_test(_notes.clear)
    return found


_notes: list[str] = []


def use_up_process(rank: int) -> int:
    use_up()
    return os.getpid()
