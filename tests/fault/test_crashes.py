"""A crash is reported to the other ranks at once, and still reaches other handlers of the signal."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import paceline
from paceline.errors import PeerLostError
from tests.harness import run_ranks

_START = """
    import ctypes, faulthandler, os, signal, sys
    import paceline

    def crash():
        ctypes.string_at(0)

    def join():
        return paceline.init(rank=0, world_size=1)
"""


def run_alone(script):
    """The exit status and output of a program of one rank."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_START) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def skip_without_paddle():
    if importlib.util.find_spec("paddle") is None:
        pytest.skip("PaddlePaddle is not installed")


def die(rank, how):
    """Rank 1 crashes; the others return their errors."""
    if how == "with Paddle":
        import paddle  # noqa: F401  (it has handlers of its own, which end the process)
    group = paceline.init(rank=rank, world_size=3, job_id=os.environ["PACELINE_JOB_ID"], timeout_s=60)
    group.barrier()
    if rank == 1:
        if how == "abort":
            os.abort()
        ctypes.string_at(0)
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    assert caught.value.lost == (1,)
    return str(caught.value)


# The ranks of the harness have enabled faulthandler before they join the group.
@pytest.mark.parametrize(
    ("how", "death"),
    [("abort", signal.SIGABRT), ("null pointer", signal.SIGSEGV), ("with Paddle", signal.SIGSEGV)],
)
def test_the_others_know_the_signal_before_the_process_is_gone(how, death):
    if how == "with Paddle":
        skip_without_paddle()
    answers = run_ranks(die, 3, {"how": how}, group=None, dies={1: death})
    for error in (answers[0], answers[2]):
        assert f"crashed: {death.name}" in error  # known from the crash itself, not from the kernel


@pytest.mark.parametrize("when", ["before", "after", "between two groups", "never"])
def test_faulthandler_still_reports(when):
    script = {
        "before": "faulthandler.enable(); group = join()",
        "after": "group = join(); faulthandler.enable()",
        "between two groups": "group = join(); faulthandler.enable(); group.close(); group = join()",
        "never": "group = join()",
    }[when]
    status, output = run_alone(script + "\ncrash()")
    assert status == -signal.SIGSEGV
    assert output.count("Fatal Python error: Segmentation fault") == (when != "never")
    assert output.count("in crash") == (when != "never")


def test_faulthandler_can_be_disabled_and_enabled_again():
    status, output = run_alone("""
        faulthandler.enable()
        first = join()
        faulthandler.disable()  # which takes ours away as well
        second = join()
        faulthandler.enable()
        first.close()
        second.close()
        third = join()
        crash()
    """)
    assert status == -signal.SIGSEGV
    assert output.count("Fatal Python error: Segmentation fault") == 1


def test_a_python_handler_of_such_a_signal_is_no_crash():
    status, output = run_alone("""
        calls = []
        signal.signal(signal.SIGABRT, lambda *_: calls.append(1))
        signal.signal(signal.SIGFPE, signal.SIG_IGN)
        group = join()
        for number in (signal.SIGABRT, signal.SIGFPE):
            os.kill(os.getpid(), number)
        assert calls == [1]
        group.barrier()
        group.close()
        os.kill(os.getpid(), signal.SIGABRT)
        assert calls == [1, 1]
    """)
    assert (status, output) == (0, "")


def test_a_crash_in_a_forked_child_is_its_own():
    status, output = run_alone("""
        group = join()
        child = os.fork()
        if child == 0:
            crash()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
        group.barrier()
    """)
    assert (status, output) == (0, "")


def test_paddles_report_still_comes():
    skip_without_paddle()
    status, output = run_alone("import paddle\ngroup = join()\ncrash()")
    assert status == -signal.SIGSEGV
    assert "FatalError" in output


@pytest.mark.parametrize("before", ["", "faulthandler.register(signal.SIGUSR2)", "faulthandler.enable()"])
def test_handlers_have_room_for_a_report(before):
    """faulthandler's alternate stack has 10 KiB of the heap, which Paddle's report of a crash overflowed."""
    status, output = run_alone(f"""
        class Stack(ctypes.Structure):
            _fields_ = [("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("nbytes", ctypes.c_size_t)]

        {before}
        group = join()
        stack = Stack()
        ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
        print(stack.flags, stack.nbytes)
    """)
    assert (status, output) == (0, "0 262144\n")
