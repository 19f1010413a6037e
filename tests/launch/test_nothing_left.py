"""No process of a job stays, whichever of its processes is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launch.conftest import WITHIN_S, Launcher, read_pids, seconds_until_gone

# Each rank has two child processes, one of them in a session of its own.
FAMILY = """
    import subprocess
    children = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
    print("pid", os.getpid(), *(child.pid for child in children))
"""
STAY = FAMILY + "    time.sleep(1000)\n"
SOON_S = 30.0  # 2 s on an idle machine; the processes themselves would run for 1000 s


def test_the_launcher_is_killed(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script=STAY)
    pids = read_pids(process, 6)
    process.kill()
    assert seconds_until_gone(pids) < SOON_S


def test_the_supervisor_is_killed(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script=STAY)
    pids = read_pids(process, 6)
    supervisor = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    _, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 137
    assert "the supervisor was killed by SIGKILL" in stderr
    assert seconds_until_gone(pids) < SOON_S


def test_launcher_and_supervisor_are_killed_at_once(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script="print('pid', os.getpid()); time.sleep(1000)")
    pids = read_pids(process, 2)
    supervisor = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (process.pid, supervisor):
        os.kill(pid, signal.SIGSTOP)  # so that neither detects the other's end
    for pid in (process.pid, supervisor):
        os.kill(pid, signal.SIGKILL)
    assert seconds_until_gone(pids) < SOON_S


def test_the_launcher_is_killed_while_its_output_is_not_read(launcher: Launcher) -> None:
    process = launcher.start(
        "-n", "2", "script.py", script=STAY.replace("time.sleep(1000)", "while True: print('x' * 999)")
    )
    pids = read_pids(process, 6)
    process.kill()
    assert seconds_until_gone(pids) < SOON_S


def test_processes_that_ranks_leave_behind_are_ended_and_reported(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script=FAMILY)
    pids = read_pids(process, 6)
    _, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
    assert stderr.count("(sleep 1000)") == 4
    assert seconds_until_gone(pids) < SOON_S


SPAWNING = """
    import os, subprocess, sys, time
    import paceline

    def stay(rank):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("pid", os.getpid(), child.pid)
        time.sleep(1000)

    if __name__ == "__main__":
        if sys.argv[1] == "fork" and os.fork() == 0:
            time.sleep(2)  # holds what the parent held
            os._exit(0)
        context = paceline.spawn(stay, nprocs=2, join=False, daemon=True)
        context.pids()
        if sys.argv[1] == "exit":
            sys.stdin.readline()
        else:
            context.join()
"""


@pytest.mark.parametrize("how", ["fork", "exit"])
def test_the_process_that_called_spawn_ends(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(SPAWNING))
    with subprocess.Popen(
        [sys.executable, str(program), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pids = read_pids(process, 4)
        if how == "exit":
            process.communicate("\n", timeout=WITHIN_S)
        else:
            process.kill()
        assert seconds_until_gone(pids) < SOON_S
