"""`paceline.spawn`: functions on several ranks."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import ConfigError, LaunchError
from paceline.launch import pickled_call
from tests.launch.conftest import WITHIN_S
from tests.launch.programs import (
    hang_last,
    hang_or_fail,
    put_rank,
    raise_in_a_group,
    wait_for_file,
    write_place,
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_each_rank_is_called_in_its_environment(tmp_path: Path) -> None:
    assert paceline.spawn(write_place, (tmp_path, "word"), nprocs=2) is None
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["0 2 0 word", "1 2 1 word"]


def test_queues_are_shared_and_output_goes_to_sys_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    queue = multiprocessing.get_context("spawn").Queue()
    paceline.spawn(put_rank, (queue,), nprocs=2)
    assert sorted(queue.get(timeout=WITHIN_S) for _ in range(2)) == [10, 11]
    queue.close()
    queue.join_thread()
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] put 0", "[rank 1] put 1"]


def test_the_first_failure_is_raised_and_a_hung_rank_shows_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        paceline.spawn(hang_or_fail, (tmp_path / "hangs",), nprocs=2, grace_s=2.0)
    error: Any = caught.value
    assert (error.rank, error.exit_status, error.signal) == (1, 1, 0)
    assert "Rank 1 of 2 failed first" in str(error)
    assert "rank 0: stopped by the launcher (SIGTERM)" in str(error)
    assert error.traceback.splitlines()[-1] == "ValueError: boom"
    assert "in hang_or_fail" in error.traceback
    assert error.failures[0].rank == 1
    shown = capsys.readouterr().err
    assert "in hang_or_fail" in shown[shown.index("where rank 0 is:") :]


def test_a_rank_that_hangs_after_all_others_is_named() -> None:
    with pytest.raises(LaunchError, match="Rank 1 of 2 did not end after all others, and hung") as caught:
        paceline.spawn(hang_last, nprocs=2, exit_timeout_s=1.0)
    assert caught.value.exit_status == 124


def test_a_context_is_joined_later(tmp_path: Path) -> None:
    context = paceline.spawn(wait_for_file, (tmp_path / "go",), nprocs=2, join=False)
    assert context is not None
    assert len(context.pids()) == 2
    assert context.join(timeout=0.1) is False
    (tmp_path / "go").touch()
    assert context.join(timeout=WITHIN_S) is True
    assert context.join() is True


def test_a_job_that_takes_too_long(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"did not end within 0\.3 s"):
        paceline.spawn(wait_for_file, (tmp_path / "never",), nprocs=1, timeout_s=0.3)


def test_a_context_can_be_stopped(tmp_path: Path) -> None:
    context = paceline.spawn(wait_for_file, (tmp_path / "never",), nprocs=2, join=False)
    assert context is not None
    context.pids()
    context.stop()
    with pytest.raises(LaunchError, match="stopped before it ended"):
        context.join()


@pytest.mark.parametrize("is_file", [True, False])
def test_functions_of_a_script_and_of_a_notebook(python: Run, is_file: bool) -> None:
    done = python(
        """
        import multiprocessing, sys
        import paceline
        class Config:
            scale = 2
        def scaled(rank, config, queue):
            print(config.scale * rank)
            queue.put(rank)
        if __name__ == "__main__":
            queue = multiprocessing.get_context("spawn").Queue()
            paceline.spawn(scaled, (Config(), queue), nprocs=2)
            print(sorted(queue.get(timeout=200) for _ in range(2)))
            offset = 5
            exec("def inner(rank): print('inner', offset + rank)")
            paceline.spawn(inner if "-" in sys.argv else lambda rank: inner(rank), nprocs=1)
        """,
        is_file=is_file,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(lines[:2]) == ["[rank 0] 0", "[rank 1] 2"]
    assert lines[2:] == ["[0, 1]", "inner 5"]


def test_a_script_without_the_main_guard_is_reported(python: Run) -> None:
    done = python("import paceline\ndef f(rank): pass\npaceline.spawn(f, nprocs=2)\n")
    assert done.returncode == 1
    assert '__name__ == "__main__"' in done.stderr


def test_ctrl_c_stops_the_ranks(python: Run) -> None:
    done = python(
        """
        import os, signal, time
        import paceline
        def stay(rank):
            print("stays")
            if rank == 0:
                os.kill(int(os.environ["CALLER"]), signal.SIGINT)
            time.sleep(1000)
        if __name__ == "__main__":
            os.environ["CALLER"] = str(os.getpid())
            try:
                paceline.spawn(stay, nprocs=2, grace_s=0.5)
            except KeyboardInterrupt:
                print("interrupted")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "interrupted"


def test_a_function_that_is_sent_by_value_keeps_the_name_of_its_file() -> None:
    """A rank's traceback shows the lines of a notebook's cell by it. cloudpickle drops it since 3.1.3."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cell = "def outer():\n    def inner():\n        raise ValueError\n    return inner\n"
    exec(compile(cell, "/tmp/cell 7.py", "exec"), space)
    function, arguments = pickle.loads(pickled_call._cloudpickle_call(space["outer"], (3,)))
    assert arguments == (3,)
    assert {each.__code__.co_filename for each in (function, function())} == {"/tmp/cell 7.py"}


def test_arguments_that_cannot_be_sent_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        paceline.spawn(print, (threading.Lock(),), nprocs=1)
    monkeypatch.setattr(pickled_call, "_has_cloudpickle", lambda: False)
    with pytest.raises(ConfigError, match="pip install cloudpickle"):
        paceline.spawn(lambda rank: None, nprocs=1)


def test_bad_arguments_are_reported() -> None:
    with pytest.raises(ConfigError, match="start_method='fork'"):
        paceline.spawn(print, nprocs=1, start_method="fork")
    with pytest.raises(ConfigError, match="fn='print' is not usable"):
        paceline.spawn("print", nprocs=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nprocs=0 is not usable"):
        paceline.spawn(print, nprocs=0)


def test_other_ranks_errors_have_the_exception(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"Rank 1 of 2 failed first.*ValueError: the cause"):
        paceline.spawn(raise_in_a_group, (tmp_path,), nprocs=2)
    assert "ValueError: the cause" in (tmp_path / "learned").read_text()


def test_a_module_in_the_current_folder_does_not_run_in_the_launcher(python: Run, tmp_path: Path) -> None:
    for name in ("pickle", "signal", "selectors", "json"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder ran')")
    program = """
        import sys
        here, sys.path[:1] = sys.path[:1], []  # as a script that lies elsewhere has it
        import paceline
        from multiprocessing import get_context
        if __name__ == "__main__":
            paceline.spawn(print, nprocs=1)
    """
    done = python(program)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_started_without_standard_streams(tmp_path: Path) -> None:
    """As from cron, or from a shell with `>&-`. A file opened later must not become standard output."""
    (tmp_path / "program.py").write_text(
        "import os, paceline\n"
        "def write(rank, folder):\n"
        "    print('said')\n"
        "    open(os.path.join(folder, str(rank)), 'w').close()\n"
        "if __name__ == '__main__':\n"
        "    paceline.spawn(write, (os.getcwd(),), nprocs=2)\n"
    )
    command = f"exec {sys.executable} program.py <&- >&- 2>&-"
    done = subprocess.run(command, shell=True, cwd=tmp_path, timeout=WITHIN_S)
    assert done.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


def test_a_full_disk_behind_a_stream_of_the_programs_own_does_not_end_the_job(python: Run) -> None:
    """For example, a program redirects its output to a file with `contextlib.redirect_stdout`."""
    done = python(
        """
        import contextlib, os, sys, paceline

        def train(rank):
            for line in range(1000):
                print("x" * 200, flush=True)
            os.close(os.open(f"trained{rank}", os.O_CREAT))

        if __name__ == "__main__":
            full = open("/dev/full", "w")
            with contextlib.redirect_stdout(full):
                paceline.spawn(train, nprocs=2)
            with contextlib.suppress(OSError):
                full.close()
            assert {"trained0", "trained1"} <= set(os.listdir())
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the output of the ranks cannot be written: No space left on device") == 1
