"""Trials under a launcher: paceline run, paceline.spawn or torchrun, with new interpreters.

They use the same plans, program and judge as forked ranks. The differences: the launcher starts the ranks,
and it can itself be struck. Each trial takes seconds, for importing the framework, so there are few.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from tests.chaos.board import Board
from tests.chaos.plans import Expected, Plan
from tests.chaos.strikes import signal_of
from tests.chaos.trial import Ended, Outside, Result, left_names
from tests.harness.leftovers import left_in_folder, shm_names

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = Path(__file__).with_name("launched_rank.py")
_DEADLINE_S = 240.0  # nearly all of it for imports, on a busy machine
_PATIENCE_S = 10.0
"""The time after the launcher's end in which its processes may still be ending."""
_PAUSE_S = 0.3
_MARK = "CHAOS_TRIAL"
_UNREAD = "standard output has not been read"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_launched(plans: Iterable[Plan]) -> Iterator[Result]:
    """Run trials one after the other."""
    for plan in plans:
        yield _run(plan)


def _run(plan: Plan) -> Result:
    shm_before, mark = shm_names(), uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "tmp").mkdir()
    (folder / "plan").write_bytes(pickle.dumps(plan))
    board = Board(folder / "board", plan.job.world_size)
    begun_s = time.monotonic()
    with (folder / "output").open("wb") as output, _stdout(plan, output) as (stdout, reader):
        launcher = subprocess.Popen(
            _command(plan, folder),
            cwd=folder,
            env=_environment(folder, mark),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=output,
            start_new_session=True,
        )
        is_hung = _watch(plan, board, launcher, begun_s + _DEADLINE_S, folder / "output", reader)
    left = [f"process {each}" for each in _end_marked(mark)]
    launcher.wait()
    left += left_names(shm_before)
    left += [f"$TMPDIR/{name}" for name in left_in_folder(folder / "tmp")]
    printed = (folder / "output").read_text(errors="replace")
    reports = [board.report(rank) for rank in range(plan.job.world_size)]
    ranks = tuple(
        Ended(
            0 if report is not None and report.how == "done" else 1,
            report,
            "hung" if is_hung else "",
            printed[-4000:],
        )
        for report in reports
    )
    struck_s = max(map(board.struck_at_s, plan.fault.struck))
    took_s = time.monotonic() - begun_s
    board.close()
    shutil.rmtree(folder, ignore_errors=True)
    return Result(
        plan, ranks, struck_s, bool(struck_s), False, tuple(left), took_s, (launcher.returncode, printed)
    )


@contextlib.contextmanager
def _stdout(plan: Plan, output: IO[bytes]) -> Iterator[tuple[IO[bytes], int]]:
    """The launcher's standard output, and the end of it that the test reads; -1: the test reads none."""
    family, name = plan.fault.kind.family, plan.fault.kind.name
    if family == "full pipe":
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        with open(writer, "wb") as pipe:
            yield pipe, reader
        os.close(reader)
    elif name == "full disk: output":
        with open("/dev/full", "wb") as full:
            yield full, -1
    else:
        yield output, -1


def _command(plan: Plan, folder: Path) -> list[str]:
    launcher, count = plan.job.launcher, str(plan.job.world_size)
    ranks = [str(_SCRIPT), str(folder)]
    options: dict[str, str] = {}
    if plan.expected is Expected.HELD or plan.fault.kind.family == "full pipe":
        options["exit_timeout_s"] = "2"
    if plan.fault.kind.name == "full disk: logs":
        options["log_dir"] = str(_full_logs(folder / "logs", plan.job.world_size))
    if launcher == "paceline run":
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        return [sys.executable, "-m", "paceline", "run", "-n", count, *words, *ranks]
    if launcher == "paceline.spawn":
        return [sys.executable, *ranks, count, json.dumps(options)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    return [*torchrun, "--log-dir", str(folder / "logs"), *ranks]


def _full_logs(folder: Path, world_size: int) -> Path:
    """A folder with a log for each rank on a disk that is full; needs root."""
    folder.mkdir()
    for rank in range(world_size):
        os.mknod(folder / f"rank{rank}.log", 0o666 | stat.S_IFCHR, Path("/dev/full").stat().st_rdev)
    return folder


def _environment(folder: Path, mark: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    return inherited | {
        _MARK: mark,
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
    }


def _watch(
    plan: Plan,
    board: Board,
    launcher: subprocess.Popen[bytes],
    until_s: float,
    said: Path,
    reader: int,
) -> bool:
    """Strike when the fault is due, until the launcher has ended; return whether it had to be killed.

    If the launcher has a `reader`: read it, or end the job once its ranks have ended.
    """
    outside, fault = Outside(plan.fault), plan.fault
    is_reading = False
    continue_s, paused = 0.0, 0
    while launcher.poll() is None:
        now = time.monotonic()
        if now > until_s:
            launcher.kill()
            return True
        if outside.is_due(board):
            board.note_strike(fault.rank, now)
            if fault.kind.name.startswith("launcher "):
                launcher.send_signal(signal.Signals[fault.kind.name.removeprefix("launcher ")])
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(board.pid(fault.rank), signal_of(fault))
                if fault.kind.name == "SIGSTOP and SIGCONT":
                    paused, continue_s = board.pid(fault.rank), now + _PAUSE_S
        if is_reading:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 1 << 16)
        elif reader >= 0 and _UNREAD in said.read_text(errors="replace"):
            is_reading = plan.expected is Expected.FINE
            if not is_reading and not any(map(_is_there, map(board.pid, range(plan.job.world_size)))):
                launcher.send_signal(signal.SIGTERM)
                reader = -1
        if paused and now > continue_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(paused, signal.SIGCONT)
            paused = 0
        time.sleep(0.002)
    return False


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _end_marked(mark: str) -> list[int]:
    """Processes of this trial that outlive the launcher for long. Kills them."""
    until = time.monotonic() + _PATIENCE_S
    while (pids := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _marked(mark: str) -> list[int]:
    """Living processes that have the trial's mark in their environment; a zombie has none."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found
