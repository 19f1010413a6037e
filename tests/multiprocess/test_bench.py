"""The bench's conductor against workers that obey, raise, die and hang; and one real run of each bench."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.bench.conductor import ContenderFailed, Job
from paceline.bench.contest import Contest, Entry
from tests.harness.warm import warm_python

OBEDIENT = "tests.multiprocess.bench_subjects:Obedient"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def job_of(**options: object) -> Job:
    return Job("subject", OBEDIENT, 2, options=options)


def assert_all_gone(job: Job) -> None:
    for pid in job.pids:
        assert not Path(f"/proc/{pid}").exists()


def test_results_come_by_rank_and_nothing_is_left():
    with job_of() as job:
        job.start()
        assert job.call("double", number=5) == [10, 11]
        assert job.call("double", number=6) == [12, 13]
    assert_all_gone(job)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "rank 1 raised ValueError: no good"),
        ("exit", "rank 1 ended with exit code 3"),
        ("kill", "rank 1 was ended by SIGKILL"),
        ("hang", "rank 1 took longer than 2 s"),
    ],
)
def test_what_goes_wrong_on_one_rank_is_told(how, why):
    with job_of(bad=1) as job:
        job.start()
        start = time.monotonic()
        with pytest.raises(ContenderFailed, match=why):
            job.call("misbehave", how=how, limit_s=2.0 if how == "hang" else 60.0)
        assert time.monotonic() - start < 30
        assert job.is_over
        with pytest.raises(ContenderFailed, match=why):
            job.call("double", number=1)
    assert_all_gone(job)


def test_a_job_that_can_not_start_tells_why():
    job = Job("subject", "tests.multiprocess.bench_subjects:Missing", 2)
    with job, pytest.raises(ContenderFailed, match="has no attribute 'Missing'"):
        job.start()
    assert_all_gone(job)


def test_survivors_answer_after_a_kill():
    with job_of() as job:
        job.start()
        job.kill(1)
        job.send("double", number=1)
        answers = job.collect(60.0)
    assert answers[0] == {"result": 2}
    assert "SIGKILL" in answers[1]["error"]


def test_a_contender_that_fails_leaves_and_the_others_go_on():
    said: list[str] = []
    entries = [
        Entry("paceline_x", "Good", OBEDIENT),
        Entry("gloo", "Bad", OBEDIENT, {"bad": 0}),
        Entry("mpi", "Absent", OBEDIENT, missing=lambda: "it is not here"),
    ]
    with Contest(entries, 2, said.append) as contest:
        contest.on_all("prepare", "4 B", nbytes=4)
        timings = contest.measure("4 B", rounds=3, sample_s=0.02)
    assert list(timings) == ["paceline_x"]
    assert timings["paceline_x"].iterations == 20
    assert timings["paceline_x"].samples == [[pytest.approx(0.001)] * 3] * 2
    assert contest.absent == {"Absent": "it is not here"}
    assert "raised ArithmeticError: wrong answer" in contest.failures["Bad"]
    assert not contest.ours_failed


def test_a_contender_may_have_its_own_number_of_processes():
    entries = [Entry("one", "One", OBEDIENT, processes=1), Entry("paceline_x", "Good", OBEDIENT)]
    with Contest(entries, 2, lambda line: None) as contest:
        contest.prepare("4 B", nbytes=4)
        timings = contest.measure("4 B", rounds=2, sample_s=0.02)
    assert [len(timings[key].samples) for key in ("one", "paceline_x")] == [1, 2]


def test_all_processes_are_started_anew_and_prepared_for_a_part_of_the_rounds():
    pids = []
    with Contest([Entry("paceline_x", "Good", OBEDIENT)], 2, lambda line: None, starts=3) as contest:
        (only,) = contest.contenders
        start_anew = only.start_anew
        only.start_anew = lambda: (pids.append(only.job.pids), start_anew())
        contest.prepare("4 B", nbytes=4)
        timing = contest.measure("4 B", rounds=6, sample_s=0.02)["paceline_x"]
        pids.append(only.job.pids)
    assert timing.starts == 3
    assert timing.samples == [[pytest.approx(0.001)] * 6] * 2
    assert len({pid for each in pids for pid in each}) == 6
    assert not contest.ours_failed


def bench(tmp_path: Path, *arguments: str, python: str = sys.executable) -> dict[str, object]:
    """Run `paceline bench`; it must succeed. Its JSON."""
    path = tmp_path / "report.json"
    command = [python, "-m", "paceline", "bench", *arguments, "--rounds", "1", "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    content: dict[str, object] = json.loads(path.read_text())
    assert content["is_complete"] is True
    return content


def test_all_reduce_without_torch(tmp_path):
    content = bench(tmp_path, "all_reduce", "--sizes", "4,64KiB", "--only", "paceline_region,paceline_any")
    assert [(row["bytes"], row["contender"]) for row in content["rows"]] == [
        (4, "paceline_region"),
        (4, "paceline_any"),
        (65536, "paceline_region"),
        (65536, "paceline_any"),
    ]
    assert all(row["median_s"] > 0 for row in content["rows"])


@needs_torch
def test_step_against_torch(tmp_path):
    plot = tmp_path / "step.png"
    drawing = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    only = "alone,torch,paceline_view"
    content = bench(
        tmp_path, "step", "--models", "toy", "--only", only, *drawing, python=warm_python("torch")
    )
    ways = {row["way"] for row in content["rows"]}
    assert ways == set(only.split(","))
    assert not drawing or plot.stat().st_size > 10_000


@pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="needs PaddlePaddle")
def test_step_against_paddle(tmp_path):
    content = bench(
        tmp_path, "step", "--framework", "paddle", "--models", "toy,deep", python=warm_python("paddle")
    )
    rows = [(row["model"], row["way"]) for row in content["rows"]]
    ways = ("alone", "paddle", "paceline", "paceline_view")
    assert rows == [(model, way) for model in ("toy", "deep") for way in ways]


@needs_torch
def test_killed_is_noticed(tmp_path):
    content = bench(tmp_path, "killed", "--only", "paceline", "--resident", "16", python=warm_python("torch"))
    (one,) = content["rows"]["paceline"]
    assert one["named"] and max(one["seconds"]) < 10


@needs_torch
def test_memory_counts_gradients(tmp_path):
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("this kernel has no smaps_rollup")
    content = bench(tmp_path, "memory", "--only", "alone,paceline_view", python=warm_python("torch"))
    for row in content["rows"].values():
        assert row["peak_bytes"] > 0.8 * row["gradient_bytes"]


@needs_torch
def test_memory_of_a_training_is_that_of_one_model_two_gradients_and_one_state(tmp_path):
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("this kernel has no smaps_rollup")
    arguments = ("--of", "training", "--only", "paceline_shared_view")
    content = bench(tmp_path, "memory", *arguments, python=warm_python("torch"))
    row = content["rows"]["paceline_shared_view"]
    assert row["after_bytes"] / content["parameter_bytes"] == pytest.approx(1 + 2 + 2, rel=0.04)
    assert row["peak_bytes"] >= row["after_bytes"] * 0.99


@needs_torch
def test_throughput_is_compared_with_one_process(tmp_path):
    only = "solo,paceline_shared"
    content = bench(tmp_path, "throughput", "--models", "rl", "--only", only, python=warm_python("torch"))
    assert [(row["variant"], row["way"], row["batch"]) for row in content["rows"]] == [
        (variant, way, 32 if way == "solo" else 64)
        for variant in ("Adam", "Adam, fused")
        for way in only.split(",")
    ]
    assert [len(row["samples_s"]) for row in content["rows"]] == [1, 2] * 2
    assert all(row["optimizer_s"] > 0 for row in content["rows"])
    assert [row["waited_s"] is not None for row in content["rows"]] == [False, True] * 2


@needs_torch
def test_features_are_compared_with_the_default(tmp_path):
    content = bench(tmp_path, "features", "--only", "paceline,check", python=warm_python("torch"))
    ways = [(row["model"], row["way"], row["parameters"]) for row in content["rows"]]
    assert ways == [(m, w, p) for m, p in (("many", 300), ("gpt", 72)) for w in ("paceline", "check")]


@needs_torch
def test_recording_is_measured_in_the_processes_that_go_without(tmp_path):
    content = bench(tmp_path, "trace", "--models", "toy", "--sample-s", "0.01", python=warm_python("torch"))
    assert [(row["model"], row["way"]) for row in content["rows"]] == [
        ("toy", way) for way in ("off", "flight", "trace")
    ]
    assert all(len(row["samples_s"]) == 2 for row in content["rows"])


@needs_torch
def test_an_optimizers_steps_are_measured(tmp_path):
    arguments = ("--parameters", "1", "--only", "whole,paceline,paceline_scatter")
    content = bench(tmp_path, "optimizer", *arguments, python=warm_python("torch"))
    assert [(row["variant"], row["way"]) for row in content["rows"]] == [
        (variant, way)
        for variant in ("AdamW", "AdamW, fused", "backward, AdamW, fused")
        for way in ("whole", "paceline", "paceline_scatter")
    ]
    assert content["parameters"] == 1_025_000
    assert all(len(row["samples_s"]) == 2 for row in content["rows"])


@needs_torch
def test_hooks_are_measured(tmp_path):
    only = "alone,empty,paceline,torch_noop"
    content = bench(tmp_path, "hook", "--only", only, python=warm_python("torch"))
    assert content["parameters"] == 300
    assert [row["way"] for row in content["rows"]] == only.split(",")


@needs_torch
def test_indices_are_counted(tmp_path):
    content = bench(tmp_path, "data", "--length", "100000", python=warm_python("torch"))
    found = {(row["task"], row["contender"]): row["indices"] for row in content["rows"]}
    counts = {"start": 1, "bulk": 5000, "iterate": 1000, "loader": 100}
    assert found == {(task, way): n for task, n in counts.items() for way in ("paceline", "torch")}
