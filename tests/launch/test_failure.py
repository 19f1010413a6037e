"""If a rank fails, the launcher stops the others, and reports the first failure last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.harness.warm import warm_python
from tests.launch.conftest import WITHIN_S, Launcher, read_pids, seconds_until_gone

ROOT = Path(__file__).resolve().parents[2]
HANG = "time.sleep(1000)"
# Ranks that hang get it twice: before SIGTERM, and after it, when a busy machine takes a while to end them.
GRACE = ("--grace-s", "2")


@pytest.mark.parametrize(
    ("fault", "exit_status", "words"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom (exit status 1)"),
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_reported_last(
    launcher: Launcher, fault: str, exit_status: int, words: str
) -> None:
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


@pytest.mark.parametrize("prints", [False, True])
def test_a_blank_line_separates_the_report_from_what_was_printed(launcher: Launcher, prints: bool) -> None:
    script = """
        if rank == 0 and {prints}:
            print("said", file=sys.stderr)
        raise ValueError("boom")
    """
    done = launcher.run("-n", "2", "script.py", script=script.replace("{prints}", str(prints)))
    before, separator, _ = done.stderr.partition("paceline: rank ")
    assert separator and before == "[rank 0] said\n\n" * prints


def test_the_traceback_of_the_first_failure_follows_those_of_the_others(launcher: Launcher) -> None:
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


def test_an_error_that_all_ranks_raise_is_printed_once_and_briefly(launcher: Launcher) -> None:
    script = """
        import torch
        from paceline.torch import DistributedDataParallel

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            def forward(self, x):
                return self.used(x)

        torch.distributed.init_process_group("paceline")
        DistributedDataParallel(Model())(torch.ones(1, 2)).sum().backward()
    """
    launcher.python = warm_python("torch")
    done = launcher.run("-n", "4", "script.py", script=script)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline: all 4 ranks raised the same error, after ")
    assert "UnusedParameterError: 2 of 4 parameters got no gradient on any of the 4 ranks." in last
    if (
        done.stderr.count("Traceback") == 1
    ):  # else a rank took longer than 10 s to end, and was not waited for
        assert len(done.stderr.splitlines()) <= 25
        assert "[rank" not in done.stderr
    report = done.stderr[done.stderr.index("'s traceback:") :]
    assert report.count("  File ") == 1, "frames of torch and Paceline are left out"


def test_a_traceback_that_a_rank_survives_is_shown_when_it_has_ended(launcher: Launcher) -> None:
    script = """
        import traceback
        try:
            raise KeyError("caught")
        except KeyError:
            traceback.print_exc()
        sys.exit(3 if rank else 0)
    """
    done = launcher.run("-n", "2", "script.py", script=script)
    assert done.stderr.count("[rank 0] KeyError: 'caught'") == 1
    assert done.stderr.count("[rank 1] KeyError: 'caught'") == 1


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


def test_survivors_may_clean_up_within_the_grace_period(launcher: Launcher) -> None:
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


def test_the_traceback_of_a_single_rank_is_shown_once(launcher: Launcher) -> None:
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
    time.sleep(0.4)  # as a person does; a sooner one counts as the same Ctrl-C, passed on by a wrapper
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


SAVES_SLOWLY = f"""
    def save(*_):
        print("saving")
        time.sleep(1.5)
        print("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("pid", os.getpid())
    {HANG}
"""


def test_sigterm_leaves_longer_to_save_than_a_failure(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "--grace-s", "0.1", "script.py", script=SAVES_SLOWLY)
    read_pids(process, 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)  # a sooner one counts as the same signal, passed on by a wrapper
    process.send_signal(signal.SIGTERM)  # as Slurm does at the end of its grace time
    stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert stdout.count("saved") == 2
    assert "SIGTERM: stopping 2 ranks; SIGKILL follows in 30 s (--preempt-s)" in stderr


def test_a_rank_that_saves_for_too_long_is_killed(launcher: Launcher) -> None:
    script = SAVES_SLOWLY.replace("1.5", "1000")
    process = launcher.start("-n", "2", "--preempt-s", "0.3", "script.py", script=script)
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 128 + signal.SIGTERM and "saved" not in stdout
    assert "ranks 0-1 did not end within 0.3 s; sending SIGKILL" in stderr
    seconds_until_gone(pids)


@pytest.mark.parametrize("from_scheduler", [True, False])
def test_a_job_that_can_be_resumed_is_no_failure(launcher: Launcher, from_scheduler: bool) -> None:
    """All ranks end with EX_TEMPFAIL, one of them later, after a signal to the launcher or to the ranks.

    --preempt-s is longer than the longest timeout of poll().
    """
    script = f"""
        def stop(*_):
            if rank == 0:
                time.sleep(0.5)
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        print("pid", os.getpid())
        {HANG}
    """
    limits = ("--grace-s", "0.1", "--preempt-s", "1e7")
    process = launcher.start("-n", "2", *limits, "script.py", script=script)
    pids = read_pids(process, 2)
    for pid in [process.pid] if from_scheduler else sorted(pids):
        os.kill(pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 75, stderr
    assert "the job was preempted: all 2 ranks ended with exit status 75" in stderr
    assert "failed" not in stderr


def test_a_rank_that_waits_for_its_checkpoint_is_reported_without_stacks(launcher: Launcher) -> None:
    script = f"""
        from pathlib import Path
        import numpy as np
        from paceline import stacks
        from paceline.checkpoint.writer_process import WriterProcess
        sys.path.append({str(ROOT)!r})
        from tests.multiprocess.killed_checkpoints import CHECKPOINT_OPS, Array
        if rank == 1:
            sys.exit()
        stacks.answer_requests()
        writer = WriterProcess(CHECKPOINT_OPS, Path("checkpoints"), 1)
        writer.begin({{"world_size": 1, "values": Array(np.zeros(3))}}, 1, ())
        os.kill(int(Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()), signal.SIGSTOP)
        writer.close(1000.0)
    """
    ended = launcher.run("-n", "2", "--exit-timeout-s", "2", "script.py", script=script)
    assert "rank 0 waits until a checkpoint is written" in ended.stderr, ended.stderr
    assert "most recent call first" not in ended.stderr


def test_a_job_in_which_one_rank_alone_can_be_resumed_has_failed(launcher: Launcher) -> None:
    script = """
        sys.exit(75 if rank else 3)
    """
    ended = launcher.run("-n", "2", "script.py", script=script)
    assert ended.returncode in (3, 75) and "failed" in ended.stderr


def test_sigterm_to_all_processes_of_a_launcher_reaches_a_rank_once(launcher: Launcher) -> None:
    """As service managers send it, but this test leaves out the ranks. SIGUSR1 follows."""
    script = """
        got = []
        signal.signal(signal.SIGTERM, lambda *_: (got.append("SIGTERM"), print("saving")))
        signal.signal(signal.SIGUSR1, lambda *_: got.append("SIGUSR1"))
        print("pid", os.getpid(), os.getppid())
        while "SIGUSR1" not in got:
            time.sleep(0.01)
        print(got)
    """
    process = launcher.start("-n", "1", "script.py", script=script)
    _, supervisor = read_pids(process, 2)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "saving\n"
    os.kill(supervisor, signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    stdout, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 143 and stdout == "['SIGTERM', 'SIGUSR1']\n", stdout
    assert stderr.count("SIGTERM: stopping") == 1


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_schedulers_warning_reaches_the_ranks_that_want_it(launcher: Launcher, name: str) -> None:
    script = f"""
        if rank != 1:
            signal.signal(signal.{name}, lambda *_: print("warned"))
        if rank == 2:
            signal.signal(signal.{name}, signal.SIG_IGN)
        print("pid", os.getpid())
        while not os.path.exists("over"):
            time.sleep(0.01)
    """
    process = launcher.start("-n", "3", "script.py", script=script)
    read_pids(process, 3)
    process.send_signal(signal.Signals[name])
    assert process.stdout is not None
    assert process.stdout.readline() == "[rank 0] warned\n"
    (launcher.folder / "over").touch()
    _, stderr = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0
    assert f"{name} was not passed on to rank 1 of 3, which would have ended by it" in stderr


def test_a_schedulers_warning_does_not_end_a_launcher_that_still_imports(launcher: Launcher) -> None:
    """The signal arrives while the launcher imports this difflib instead of the standard library's."""
    module = """
        import os, signal
        if "RANK" not in os.environ:
            signal.raise_signal(signal.SIGUSR1)
            os.close(os.open("raised", os.O_CREAT))
        def get_close_matches(*args, **options):
            return []
    """
    (launcher.folder / "difflib.py").write_text(textwrap.dedent(module))
    environment = {**os.environ, "PYTHONPATH": str(launcher.folder)}
    done = launcher.run("-n", "2", "script.py", script="print('done')", env=environment)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
    assert (launcher.folder / "raised").exists()


def test_a_rank_that_hangs_after_all_others_is_named_and_stopped(launcher: Launcher) -> None:
    script = """
        import atexit
        from paceline import stacks
        def hang_here():
            time.sleep(1000)
        if rank == 1:
            stacks.answer_requests()
            atexit.register(hang_here)
    """
    done = launcher.run("-n", "3", "--exit-timeout-s", "1", "script.py", script=script)
    assert done.returncode == 124
    assert "rank 1 of 3 did not end after all others, and used no processor for 1 s" in done.stderr
    assert "where rank 1 is:" in done.stderr and "in hang_here" in done.stderr


def test_a_rank_that_is_stopped_after_all_others_is_reported_as_stopped(launcher: Launcher) -> None:
    script = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    done = launcher.run("-n", "3", "--exit-timeout-s", "1", "script.py", script=script)
    assert done.returncode == 124
    assert "rank 1 of 3 did not end after all others" in done.stderr
    assert re.search(r"rank 1 \(pid \d+\) is stopped: a signal or a debugger", done.stderr)


def test_a_rank_that_works_after_all_others_may_take_as_long_as_it_likes(launcher: Launcher) -> None:
    """The timeout is so long that even a busy machine gives the rank processor time within it."""
    script = """
        end = time.process_time() + 3
        while rank == 0 and time.process_time() < end:
            pass
        print("done")
    """
    done = launcher.run("-n", "2", "--exit-timeout-s", "2", "script.py", script=script)
    assert done.returncode == 0 and done.stdout.count("done") == 2


def test_a_full_disk_behind_standard_output_does_not_end_the_job(launcher: Launcher) -> None:
    launcher.write("print('hello', flush=True)\nopen(f'trained{rank}', 'w').close()")
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "script.py"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=launcher.folder, timeout=WITHIN_S
        )
    assert done.returncode == 0
    assert done.stderr.count("standard output cannot be written: No space left on device") == 1
    assert (launcher.folder / "trained0").exists() and (launcher.folder / "trained1").exists()
