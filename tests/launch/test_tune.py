"""`paceline tune` with scripts that record batches without a framework, as real jobs that take turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.tune import compare
from tests.launch.conftest import WITHIN_S

# With one rank a step takes 10 times as long as with two, so no load of the machine reverses the result.
TRAINS = """
import os, sys, time
from paceline.trace.recording import recording

class Batch:
    shape = (8, 3)

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
recording.begin_if_batches_count(rank, size)
for step in range(int(sys.argv[1])):
    recording.note_batch((Batch(),), {})
    time.sleep(0.03 if size == 1 else 0.003)
"""
FOR_EVER = str(10**9)

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also the cache of tune's answers. Turns are short."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(compare, "_SHORTEST_TURN_S", 0.05)
    monkeypatch.setattr(compare, "_LONGEST_TURN_S", 0.05)
    return tmp_path


def processes_of(folder: Path) -> list[int]:
    """All other processes that have this folder as TMPDIR in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if b"TMPDIR=" + os.fsencode(folder) + b"\0" in text and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def test_the_fastest_layout_is_found_stored_and_used(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(TRAINS)
    command = ["--ranks", "1,2", "--seconds", "400", "--json", "answer.json", "train.py", FOR_EVER]
    assert main(["tune", *command]) == 0
    shown = capfd.readouterr().out
    assert "2 ranks x " in shown and " is fastest: " in shown
    assert "8 with 1 rank, 16 with 2 ranks" in shown
    assert "paceline run -n 2 --threads " in shown
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["answer"]["layout"]["ranks"] == 2
    assert answer["answer"]["gain"] > 5
    assert processes_of(folder) == []
    used = "import os; print(os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])"
    (folder / "train.py").write_text(used)
    assert main(["run", "-n", "auto", "--prefix", "never", "train.py", FOR_EVER]) == 0
    shown, said = capfd.readouterr()
    threads = answer["answer"]["layout"]["threads"]
    assert shown.splitlines() == [f"2 {threads}"] * 2
    assert said.startswith(f"paceline: -n auto: 2 ranks x {threads} thread")
    assert "by `paceline tune` of 2" in said and "other arguments" not in said


def test_a_script_that_ends_early_is_reported_with_its_measurements(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(TRAINS)
    assert main(["tune", "--ranks", "1,2", "--seconds", "400", "train.py", "7"]) == 0
    shown = capfd.readouterr().out
    assert "Not sure: too few measurements of 1 rank x " in shown
    assert "the script ended after 7 steps." in shown
    assert "Nothing is stored" in shown and not (folder / "cache").exists()


def test_the_reason_why_a_script_gives_no_answer_is_reported(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def tuned(script: str, *options: str) -> str:
        (folder / "train.py").write_text(script)
        assert main(["tune", *options, "train.py"]) == 1
        shown, said = capfd.readouterr()
        assert shown == ""
        assert processes_of(folder) == []
        return said

    failed = tuned(
        "import os\nraise ValueError(f'no data for {os.environ[\"WORLD_SIZE\"]}')", "--ranks", "1,2"
    )
    assert "line 2, in <module>" in failed
    assert "1 rank x " in failed and "failed: ValueError: no data for 1" in failed
    assert "failed: ValueError: no data for 2" in failed
    assert "the script ended without a backward" in tuned("print('done')", "--ranks", "1")
    # This case must reach its deadline.
    hangs = tuned("import time; time.sleep(1000)", "--ranks", "1", "--seconds", "2")
    assert "no backward of a wrapped model within" in hangs
    assert "--seconds 4 gives it longer" in hangs
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_stopped_jobs_however_tune_ends(folder: Path, signum: int) -> None:
    (folder / "train.py").write_text(TRAINS)
    tune = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "paceline",
            "tune",
            "--ranks",
            "1,2",
            "--seconds",
            "400",
            "train.py",
            FOR_EVER,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert tune.stderr is not None
    for line in tune.stderr:
        if "starting 2 ranks" in line:  # the job of one rank is stopped by now
            break
    tune.send_signal(signum)
    tune.communicate(timeout=WITHIN_S)
    assert tune.returncode == (130 if signum == signal.SIGINT else -signum)
    until = time.monotonic() + WITHIN_S
    while left := processes_of(folder):
        assert time.monotonic() < until, left
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0,2", "train.py"], "--ranks 0,2 is not usable."),
        (["--ranks", "1,x", "train.py"], "--ranks 1,x is not usable."),
        (["--ranks", "100000", "train.py"], "more ranks than cores are never faster"),
        (["--seconds", "nan", "train.py"], "seconds=nan is not usable"),
        (["--output", "none/out.png", "train.py"], "none/out.png can't be written."),
        (["other.py"], "There is no script 'other.py'."),
        ([], "paceline tune [options] script.py"),
    ],
)
def test_wrong_options_are_reported_before_anything_starts(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("open('started', 'w')")
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "started").exists()
