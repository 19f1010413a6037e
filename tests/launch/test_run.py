"""`paceline run`: the environment, arguments and streams of a rank, and the output of the launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.env import read_rank_environment
from tests.launch.conftest import WITHIN_S, Launcher


def test_every_rank_gets_its_place_in_its_environment(launcher: Launcher) -> None:
    done = launcher.run(
        "-n",
        "3",
        "--prefix",
        "never",
        "script.py",
        script="""
        import json
        print(json.dumps(dict(os.environ)))
    """,
    )
    assert done.returncode == 0, done.stderr
    environments = [json.loads(line) for line in done.stdout.splitlines()]
    places = sorted(
        (read_rank_environment(environ) for environ in environments), key=lambda place: place.rank
    )
    assert [place.rank for place in places] == [0, 1, 2]
    assert {(place.world_size, place.local_world_size) for place in places} == {(3, 3)}
    assert len({(place.master_addr, place.master_port, place.job_id) for place in places}) == 1
    assert re.fullmatch("[0-9a-f]{32}", places[0].job_id)


def test_arguments_reach_the_script_unchanged(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "script.py", "-n", "7", "--", "-m", "a b", script="print(sys.argv[1:])")
    assert done.stdout == "['-n', '7', '--', '-m', 'a b']\n"


def test_a_module_of_the_current_folder(launcher: Launcher) -> None:
    (launcher.folder / "package").mkdir()
    launcher.write("print(__name__, sys.argv[1:])", "package/train.py")
    done = launcher.run("-n", "2", "-m", "package.train", "--lr", "1")
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] __main__ ['--lr', '1']" for r in (0, 1)]


def test_output_is_complete_and_whole(launcher: Launcher) -> None:
    done = launcher.run(
        "-n",
        "2",
        "script.py",
        script="""
        for i in range(10000):
            print("line", i, "of rank", rank)
        sys.stdout.write("no newline at the end")
    """,
    )
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        expected = [f"[rank {rank}] line {i} of rank {rank}" for i in range(10000)]
        assert mine == [*expected, f"[rank {rank}] no newline at the end"]
    assert len(lines) == 20002


def test_standard_output_and_error_are_separate_except_in_the_log(launcher: Launcher) -> None:
    script = "print('out'); print('err', file=sys.stderr)"
    done = launcher.run("-n", "2", "--log-dir", "logs/new", "script.py", script=script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert sorted(done.stderr.splitlines()) == ["[rank 0] err", "[rank 1] err"]
    for rank in (0, 1):
        text = (launcher.folder / f"logs/new/rank{rank}.log").read_text()
        assert sorted(text.splitlines()) == ["err", "out"]


def test_a_single_rank_writes_as_without_a_launcher(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "script.py", script=r"sys.stdout.write('10%\r20%\rdone')")
    assert done.stdout == "10%\r20%\rdone".replace("\r", "\n")  # universal newlines of the test


def test_standard_input_goes_to_rank_0(launcher: Launcher) -> None:
    process = launcher.start("-n", "2", "script.py", script="print(sys.stdin.read())", stdin=subprocess.PIPE)
    stdout, _ = process.communicate("hello", timeout=WITHIN_S)
    assert sorted(stdout.splitlines()) == ["[rank 0] hello", "[rank 1] "]


def test_ranks_are_bound_to_cores_of_their_own(launcher: Launcher) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("needs two cores")
    script = "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    options = ("-n", "2", "--prefix", "never", "--threads", "3", "script.py")
    done = launcher.run("--bind", "cores", *options, script=script)
    sets = [set(json.loads(line.rpartition(" ")[0])) for line in done.stdout.splitlines()]
    assert sets[0] | sets[1] == cores
    assert not sets[0] & sets[1]
    assert {line.rpartition(" ")[2] for line in done.stdout.splitlines()} == {"3"}


def test_multiprocessing_works_inside_a_rank(launcher: Launcher) -> None:
    done = launcher.run(
        "-n",
        "1",
        "script.py",
        script="""
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    )
    assert (done.returncode, done.stdout) == (0, "[2, 4]\n"), done.stderr
    assert "left behind" not in done.stderr


def test_the_launcher_imports_no_framework(tmp_path: Path) -> None:
    program = "import sys, paceline.launch.cli; print(sorted({'numpy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WITHIN_S)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_started_without_standard_streams(launcher: Launcher, closed: str) -> None:
    """As cron starts a program, or a shell with `>&-`."""
    launcher.write("print('out'); open(f'done{rank}', 'w').close()")
    command = f"exec {sys.executable} -m paceline run -n 2 script.py {closed}"
    done = subprocess.run(command, shell=True, cwd=launcher.folder, capture_output=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in launcher.folder.iterdir()} >= {"done0", "done1"}


def test_a_log_is_not_written_through_a_link(launcher: Launcher) -> None:
    precious = launcher.folder / "precious"
    precious.write_text("still here")
    (launcher.folder / "logs").mkdir()
    (launcher.folder / "logs/rank1.log").symlink_to(precious)
    done = launcher.run("-n", "2", "--log-dir", "logs", "script.py", script="print('out')")
    assert done.returncode == 2
    assert "log of rank 1" in done.stderr and f"a link to {precious}" in done.stderr
    assert precious.read_text() == "still here"


def test_a_log_does_not_wait_for_the_reader_of_a_pipe(launcher: Launcher) -> None:
    (launcher.folder / "logs").mkdir()
    os.mkfifo(launcher.folder / "logs/rank1.log")
    done = launcher.run("-n", "2", "--log-dir", "logs", "script.py", script="print('out')")
    assert done.returncode == 2
    assert "log of rank 1" in done.stderr and "a pipe" in done.stderr
