"""`make gpu-check` without a GPU: its messages, the ends of its parts, and its report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.report import Machine  # noqa: E402
from tests.gpu import host, machine, report  # noqa: E402
from tests.gpu.__main__ import LIMIT_S, plan  # noqa: E402
from tests.gpu.machine import Accelerator  # noqa: E402
from tests.gpu.models import TASKS  # noqa: E402
from tests.gpu.parts import ROOT, Ended, Part, error_in, run_parts  # noqa: E402
from tests.gpu.steps import largest_difference  # noqa: E402
from tests.gpu.ways import LABELS, WAYS  # noqa: E402

H100 = Accelerator("cuda", "NVIDIA H100 80GB HBM3", 1, "80 GiB")


def python(code: str, deadline_s: float = 60.0, ranks: int = 0, absent: str = "") -> Part:
    return Part(code[:20], ("-c", code), deadline_s, ranks, absent)


def run(*parts: Part, limit_s: float = 120.0) -> list[Ended]:
    return run_parts(parts, limit_s, lambda line: None)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_sentence_says_what_is_missing_and_nothing_runs(tmp_path):
    started = ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", f"ARGS=--output {tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ended = subprocess.run(
        [*started, "VENV=no-such-folder"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode != 0
    assert f"gpu-check: {machine.missing('cuda')}" in ended.stderr
    assert "Building" not in ended.stdout and not list(tmp_path.iterdir())


def test_without_torch_the_sentence_says_so(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.missing("cuda") == f"{sys.executable} has no torch."


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    hangs = (
        "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)"
    )
    ended = run(python(hangs, deadline_s=8.0), python("print('after it')"))
    assert [each.status for each in ended] == ["out of time", "ok"]
    assert ended[1].tail == "after it"
    for pid in map(int, pids.read_text().split()):
        limit = time.monotonic() + 30  # the kernel takes a moment
        while not has_ended(pid):
            assert time.monotonic() < limit


def test_parts_that_fail_are_absent_or_late_cost_no_other_part():
    ended = run(
        python("raise SystemExit('no such kernel')"),
        python("pass", absent="needs two GPUs"),
        python("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])", ranks=2),
    )
    assert [each.status for each in ended] == ["failed", "absent", "ok"]
    assert ended[0].tail == "no such kernel" and not ended[0].is_good
    assert ended[0].culprit == "it ended with exit status 1" and not ended[2].culprit
    assert sorted(ended[2].tail.splitlines()) == ["0 2", "1 2"]
    assert [each.status for each in run(python("pass"), limit_s=0.0)] == ["out of time"]


def test_a_rank_that_fails_ends_the_others():
    code = "import os, time; time.sleep(600) if os.environ['RANK'] == '1' else exit(3)"
    (ended,) = run(python(code, deadline_s=300.0, ranks=2), limit_s=300.0)
    assert (ended.status, ended.culprit) == ("failed", "rank 0 of 2 ended with exit status 3")


def test_the_rank_that_died_first_is_named_with_its_signal_and_its_stack(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
import faulthandler, os
def crash():
    faulthandler._sigsegv()
if os.environ["RANK"] == "1":
    held = open({str(fifo)!r}, "w")
    crash()
open({str(fifo)!r}).read()  # until rank 1 is gone
raise RuntimeError("rank 1 is gone\\n" * 100)
"""
    (ended,) = run(python(code, ranks=2, deadline_s=110.0))
    assert (ended.status, ended.culprit) == ("failed", "rank 1 of 2 died of SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in ended.tail and "in crash" in ended.tail
    assert "rank 1 is gone" not in ended.tail
    assert "rank 1 of 2 died of SIGSEGV" in ended.summary
    noted = report.make_report(H100, Machine.here(), [ended], [found()], "").as_markdown()
    assert "failed, rank 1 of 2 died of SIGSEGV, " in noted and "in crash" in noted


def test_a_part_that_is_out_of_time_shows_where_it_is():
    code = "import time\ndef waits():\n    time.sleep(600)\nprint('begun')\nwaits()"
    (ended,) = run(python(code, ranks=1, deadline_s=8.0))
    assert (ended.status, ended.culprit) == ("out of time", "rank 0 of 1 had not ended after 8 s")
    assert "begun" in ended.tail and "in waits" in ended.tail


def test_an_error_is_shown_from_its_first_line_on():
    before, after = [f"before {at}" for at in range(500)], [f"after {at}" for at in range(500)]
    error = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: this"]
    shown = error_in("\n".join(before + error + after)).splitlines()
    assert shown[0] == "before 495" and shown[5:8] == error and shown[-1] == "after 499"
    assert len(shown) < 80
    stack = ["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):", *after, ""]
    stack += ["Current thread 0x2 (most recent call first):", '  File "y.py", line 2 in here', ""]
    shown = error_in("\n".join(before + error + stack)).splitlines()
    assert shown[5:8] == [stack[0], *stack[-3:-1]]
    assert error_in("\n".join(before)).splitlines() == before[-15:]
    assert error_in("") == ""


def test_what_pytest_counted_is_reported():
    part = Part("tests", (), 1.0)
    output = "FAILED 3 passed\n=== 1 failed, 7 passed, 2 skipped, 1 warning in 9.81s ==="
    assert Ended(part, "failed", 9.8, output).counts == "1 failed, 7 passed, 2 skipped"
    assert Ended(part, "ok", 9.8, "").counts == ""


def test_all_parts_fit_into_the_time():
    parts = plan("cuda", 1, Path("results"))
    assert max(part.deadline_s for part in parts) < LIMIT_S / 3
    assert LIMIT_S < 6 * 60
    assert parts[0].command[1] == "tests.gpu.first"
    files = [path for part in parts for path in part.command if path.endswith(".py")]
    assert files and all((ROOT / path).exists() for path in files)
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "multiprocess").glob("*gpu*.py")}
    assert tests | {"tests/device/test_paddle_training.py"} == set(files)
    (several,) = [part for part in parts if part.absent]
    assert "NCCL wants one for each rank" in several.absent
    assert not any(part.absent for part in plan("cuda", 4, Path("results")))
    assert plan("cuda", 4, Path("results"))[-1].ranks == 4


@pytest.mark.parametrize(("name", "millions"), [("cnn", 25.557), ("gpt", 100.61)])
def test_the_models_have_the_sizes_that_they_are_called_by(name, millions):
    with torch.device("meta"):
        module = TASKS[name].build("whole")
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize("name", TASKS)
def test_tiny_models_have_as_many_tensors_as_whole_ones(name):
    with torch.device("meta"):
        whole, tiny = (TASKS[name].build(form) for form in ("whole", "tiny"))
    names = [[key for key, _ in module.state_dict().items()] for module in (whole, tiny)]
    assert names[0] == names[1]
    assert sum(p.numel() for p in tiny.parameters()) < 10_000


def test_a_batch_is_the_same_whenever_it_is_made():
    for task in TASKS.values():
        one, two = task.batch_of(1, 3, "cpu", "small"), task.batch_of(1, 3, "cpu", "small")
        assert all(map(torch.equal, one, two))
        other = task.batch_of(0, 3, "cpu", "small")
        assert not all(map(torch.equal, one, other))


def found(difference: float = 0.0) -> dict[str, object]:
    steps = {"alone": [[0.010, 0.011, 0.010]], "torch": [[0.012, 0.013, 0.012]], "paceline": [[0.011] * 3]}
    return {
        "model": "cnn",
        "backend": "nccl",
        "world_size": 1,
        "parameters": 25_557_032,
        "iterations": 5,
        "losses": {key: [1.0, 0.5] for key in steps},
        "steps_s": steps,
        "hosts_s": {key: [[0.001] * 3] for key in steps},
        "launches": {"alone": 100.0, "torch": 261.5, "paceline": None},
        "differences": {"alone": 0.1, "torch": 0.0, "paceline": difference},
    }


def test_the_report_names_the_gpu_and_what_came_of_each_part():
    ended = [
        Ended(Part("tests, torch", (), 1.0), "ok", 33.0, "=== 9 passed in 33.00s ==="),
        Ended(Part("bench, cnn, 2 ranks over nccl", (), 1.0, absent="needs two GPUs"), "absent", 0.0, ""),
    ]
    made = report.make_report(H100, Machine.here(), ended, [found()], "make gpu-check")
    text = made.as_markdown()
    assert made.is_complete and H100.slug == "h100-80gb-hbm3"
    assert "training steps on NVIDIA H100 80GB HBM3, one GPU" in text
    assert "tests, torch: ok, 9 passed, 33 s." in text and "absent, needs two GPUs" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "cnn" in line]
    assert rows[0][:4] == ["cnn, 25.6 M", "1, nccl", "alone, no DDP", "10 ms"]
    (torchs,) = [line for line in text.splitlines() if "| torch DDP |" in line]
    assert "| 12 ms | 1 ms | 2 ms |" in torchs and "| 262 |" in torchs


def test_the_report_of_the_host_divides_overheads():
    wide = {**found(), "tensors": 161, "buffers": 159}
    (copies,) = [
        line
        for line in host.make_report(Machine.here(), [], [wide], "").as_markdown().splitlines()
        if "| Paceline |" in line
    ]
    assert "| 1.00 ms |" in copies and "| 0.50 (0.00 .. 0.50) | - |" in copies
    same = {**wide, "steps_s": {**wide["steps_s"], "torch": wide["steps_s"]["alone"]}}
    assert "inf" not in host.make_report(Machine.here(), [], [same], "").as_markdown()


@pytest.mark.parametrize("difference", [0.01, float("nan")])
def test_losses_that_differ_from_torchs_make_the_check_fail(difference):
    made = report.make_report(H100, Machine.here(), [], [found(difference)], "make gpu-check")
    assert not made.is_complete
    assert any("WRONG: cnn, 1 ranks over nccl" in note for note in made.notes)


def test_a_part_that_failed_makes_the_check_fail():
    ended = [Ended(Part("tests, torch", (), 1.0), "out of time", 180.0, "")]
    assert not report.make_report(H100, Machine.here(), ended, [found()], "").is_complete


def test_curves_are_compared_step_by_step():
    assert largest_difference([2.0, 1.0], [2.0, 1.0]) == 0.0
    assert largest_difference([2.0, 1.0], [2.0, 1.25]) == pytest.approx(0.2)
    assert set(WAYS) == set(LABELS)
