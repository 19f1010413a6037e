"""A rank fails: the others are stopped, and the first failure is told last."""

from __future__ import annotations

import signal
import time

import pytest

from tests.launch.conftest import WITHIN_S, Launcher, read_pids, seconds_until_gone

HANG = "time.sleep(1000)"
# Ranks that hang get it twice: to end by themselves, and by SIGTERM, which takes a while on a busy machine.
GRACE = ("--grace-s", "2")


@pytest.mark.parametrize(
    ("fault", "exit_status", "words"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom (exit status 1)"),
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_told_last(launcher: Launcher, fault: str, exit_status: int, words: str) -> None:
    script = f"""
        if rank == 2:
            {fault}
        {HANG}
    """
    done = launcher.run("-n", "3", *GRACE, "script.py", script=script)
    assert done.returncode == exit_status
    assert "ranks 0-1: stopped by the launcher (SIGTERM)" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline: rank 2 of 3 failed first")
    assert words in last


def test_the_traceback_of_the_first_stands_behind_those_of_the_others(launcher: Launcher) -> None:
    script = """
        import glob, select
        class PeerLostError(RuntimeError):
            __module__ = "paceline.errors"
        if rank == 1:
            try:
                {}["key"]
            except KeyError as error:
                print("about to fail", file=sys.stderr)
                while len(others := glob.glob("survivor-*")) < 2:
                    time.sleep(0.01)
                ends = [os.pidfd_open(int(name.partition("-")[2])) for name in others]
                open("failing", "w").close()
                for end in ends:  # the survivors end before the culprit does
                    select.select([end], [], [])
                raise ValueError("the cause") from error
        open(f"survivor-{os.getpid()}", "w").close()
        while not os.path.exists("failing"):
            time.sleep(0.01)
        raise PeerLostError("all_reduce: rank 1 was lost")
    """
    done = launcher.run("-n", "3", "script.py", script=script)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("paceline: the other ranks:") :]
    assert "ranks 0, 2: PeerLostError: all_reduce: rank 1 was lost (exit status 1)" in report
    assert report.index("ranks 0, 2") < report.index("rank 1's traceback") < report.index("KeyError: 'key'")
    assert report.index("direct cause") < report.index("\nValueError: the cause")
    assert report.splitlines()[-1].endswith("ValueError: the cause (exit status 1)")


def test_the_last_line_names_the_exception_although_torch_marks_each_line(launcher: Launcher) -> None:
    script = """
        if rank == 1:
            import traceback
            def marked(kind, error, trace):
                for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
                    print(f"[rank{rank}]: {line}", file=sys.stderr)
            sys.excepthook = marked
            raise ValueError("the cause")
        time.sleep(1000)
    """
    done = launcher.run("-n", "2", *GRACE, "script.py", script=script)
    assert done.stderr.splitlines()[-1].endswith("ValueError: the cause (exit status 1)")


def test_a_segmentation_fault_shows_where(launcher: Launcher) -> None:
    script = "import faulthandler\ndef here(): faulthandler._sigsegv()\nif rank == 0: here()"
    done = launcher.run("-n", "2", "script.py", script=script)
    assert done.returncode == 139
    report = done.stderr[done.stderr.index("rank 0's traceback") :]
    assert "in here" in report


def test_ranks_that_ignore_sigterm_or_are_stopped_do_not_stay(launcher: Launcher) -> None:
    script = """
        if rank == 0:
            while not os.path.exists("deaf"):
                time.sleep(0.01)
            sys.exit(4)
        if rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("deaf", "w").close()
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    done = launcher.run("-n", "3", "--grace-s", "0.2", "script.py", script=script)
    assert done.returncode == 4
    assert "ranks 1-2 did not end within 0.2 s; sending SIGTERM" in done.stderr
    assert "stopped by the launcher (SIGKILL)" in done.stderr


def test_survivors_get_their_grace_to_say_why(launcher: Launcher) -> None:
    script = """
        if rank == 0:
            while not os.path.exists("started"):
                time.sleep(0.01)
            sys.exit(4)
        open("started", "w").close()
        time.sleep(0.5)
        print("cleaned up")
    """
    done = launcher.run("-n", "2", "script.py", script=script)
    assert done.returncode == 4
    assert "[rank 1] cleaned up" in done.stdout
    assert "rank 1: finished" in done.stderr


def test_a_job_that_takes_too_long_is_stopped(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", "--timeout-s", "0.5", "script.py", script=HANG)
    assert done.returncode == 124
    assert "the job did not end within 0.5 s; stopping ranks 0-1" in done.stderr


def test_a_single_rank_is_not_told_twice(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "script.py", script="raise ValueError('boom')")
    assert done.stderr.count("Traceback") == 1
    assert "the only rank failed" in done.stderr.splitlines()[-1]


WAIT_FOR_INTERRUPT = """
    try:
        print("pid", os.getpid())
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(7)
"""


def test_ctrl_c_reaches_each_rank_once(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script=WAIT_FOR_INTERRUPT)
    read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert sorted(stdout.splitlines()) == ["[rank 0] interrupted", "[rank 1] interrupted"]
    assert "SIGINT: stopping 2 ranks" in stderr
    assert "Traceback" not in stderr


def test_sigterm_reaches_the_ranks(launcher: Launcher) -> None:
    script = f"""
        def clean_up(*_):
            print("cleaned up")
            sys.exit(0)
        signal.signal(signal.SIGTERM, clean_up)
        print("pid", os.getpid())
        {HANG}
    """
    process = launcher.start("-n", "2", "script.py", script=script)
    read_pids(process, 2)
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert stdout.count("cleaned up") == 2


def test_the_second_ctrl_c_kills(launcher: Launcher) -> None:
    script = """
        signal.signal(signal.SIGINT, lambda *_: print("pid", os.getpid()))
        print("pid", os.getpid())
        while True:
            time.sleep(1000)
    """
    process = launcher.start("-n", "2", "--grace-s", "1000", "script.py", script=script)
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    assert sorted(read_pids(process, 2)) == sorted(pids)
    time.sleep(0.4)  # a person; what comes sooner is the same Ctrl-C, passed on by a wrapper
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert "second SIGINT" in stderr
    seconds_until_gone(pids)


def test_a_reader_that_leaves_ends_the_job(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script="while True: print('pid', os.getpid())")
    read_pids(process, 4)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(WITHIN_S) == 128 + signal.SIGPIPE
