"""One short run of each benchmark, as users start it: `python -m benchmarks ...`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.command import ROOT
from tests.harness.warm import warm_python

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def measure(
    folder: Path, *arguments: str, python: str = sys.executable, rounds: int = 1
) -> dict[str, object]:
    """Run a benchmark, which must succeed; return its JSON, which lies beside its table."""
    command = [python, "-m", "benchmarks", *arguments, "--rounds", str(rounds), "--output", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = folder.glob("*.json")
    content: dict[str, object] = json.loads(path.read_text())
    assert content["is_complete"] is True
    assert content["table"] and path.with_suffix(".md").exists()
    return content


def test_all_reduce_without_torch(tmp_path):
    content = measure(tmp_path, "all_reduce", "--sizes", "4,64KiB", "--only", "paceline_region,paceline_any")
    assert [(row["bytes"], row["case"]) for row in content["rows"]] == [
        (4, "paceline_region"),
        (4, "paceline_any"),
        (65536, "paceline_region"),
        (65536, "paceline_any"),
    ]
    assert all(row["median_s"] > 0 for row in content["rows"])


@needs_torch
def test_step_against_torch(tmp_path):
    only = "alone,torch,paceline_view"
    content = measure(tmp_path, "step", "--models", "toy", "--only", only, python=warm_python("torch"))
    cases = {row["case"] for row in content["rows"]}
    assert cases == set(only.split(","))


@pytest.mark.skipif(importlib.util.find_spec("paddle") is None, reason="needs PaddlePaddle")
def test_step_against_paddle(tmp_path):
    content = measure(
        tmp_path, "step", "--framework", "paddle", "--models", "toy,deep", python=warm_python("paddle")
    )
    rows = [(row["model"], row["case"]) for row in content["rows"]]
    cases = ("alone", "paddle", "paceline", "paceline_view")
    assert rows == [(model, case) for model in ("toy", "deep") for case in cases]


@needs_torch
def test_killed_is_noticed(tmp_path):
    content = measure(
        tmp_path, "killed", "--only", "paceline", "--resident", "16", python=warm_python("torch")
    )
    (one,) = content["rows"]["paceline"]
    assert one["named"] and max(one["seconds"]) < 10


@needs_torch
def test_memory_counts_gradients(tmp_path):
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("this kernel has no smaps_rollup")
    content = measure(tmp_path, "memory", "--only", "alone,paceline_view", python=warm_python("torch"))
    for row in content["rows"].values():
        assert row["peak_bytes"] > 0.8 * row["gradient_bytes"]


@needs_torch
def test_memory_of_a_training_is_that_of_one_model_two_gradients_and_one_state(tmp_path):
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.skip("this kernel has no smaps_rollup")
    # In Pythons of their own: the pages that a fork of a warm one writes to would count as the training's.
    content = measure(tmp_path, "memory", "--of", "training", "--only", "paceline_shared_view")
    row = content["rows"]["paceline_shared_view"]
    assert row["after_bytes"] / content["parameter_bytes"] == pytest.approx(1 + 2 + 2, rel=0.04)
    assert row["peak_bytes"] >= row["after_bytes"] * 0.99


@needs_torch
def test_throughput_is_compared_with_one_process(tmp_path):
    only = "solo,paceline_shared"
    content = measure(tmp_path, "throughput", "--models", "rl", "--only", only, python=warm_python("torch"))
    assert [(row["optimizer"], row["case"], row["batch"]) for row in content["rows"]] == [
        (variant, way, 32 if way == "solo" else 64)
        for variant in ("Adam", "Adam, fused")
        for way in only.split(",")
    ]
    assert [len(row["samples_s"]) for row in content["rows"]] == [1, 2] * 2
    assert all(row["optimizer_s"] > 0 for row in content["rows"])
    assert [row["waited_s"] is not None for row in content["rows"]] == [False, True] * 2


@needs_torch
def test_features_are_compared_with_the_default(tmp_path):
    content = measure(tmp_path, "features", "--only", "paceline,check", python=warm_python("torch"))
    ways = [(row["model"], row["case"], row["parameters"]) for row in content["rows"]]
    assert ways == [(m, w, p) for m, p in (("many", 300), ("gpt", 72)) for w in ("paceline", "check")]


@needs_torch
def test_virtual_ranks_are_compared_with_micro_batches(tmp_path):
    content = measure(tmp_path, "virtual_ranks", "--models", "toy", python=warm_python("torch"))
    assert [row["case"] for row in content["rows"]] == ["paceline_accumulated", "paceline_virtual"]
    assert content["table"][1]["of the time without"] != "-"


@needs_torch
def test_recording_is_measured_in_the_processes_that_go_without(tmp_path):
    content = measure(tmp_path, "trace", "--models", "toy", "--sample-s", "0.01", python=warm_python("torch"))
    assert [(row["model"], row["recording"]) for row in content["rows"]] == [
        ("toy", kind) for kind in ("off", "flight", "trace")
    ]
    assert all(len(row["samples_s"]) == 2 for row in content["rows"])
    assert len(content["totals_s"]["toy"]) == 2 and min(content["totals_s"]["toy"]) > 0


@needs_torch
def test_an_optimizers_steps_are_measured(tmp_path):
    arguments = ("--parameters", "1", "--only", "whole,paceline,paceline_scatter")
    content = measure(tmp_path, "optimizer", *arguments, python=warm_python("torch"))
    assert [(row["optimizer"], row["case"]) for row in content["rows"]] == [
        (variant, way)
        for variant in ("AdamW", "AdamW, fused", "backward, AdamW, fused")
        for way in ("whole", "paceline", "whole", "paceline_scatter")
    ]
    assert content["parameters"] == 1_025_000
    assert all(len(row["samples_s"]) == 2 for row in content["rows"])


@needs_torch
def test_a_checkpoint_is_measured(tmp_path):
    content = measure(tmp_path, "checkpoint", "--parameters", "1", python=warm_python("torch"))
    assert content["bytes"] >= 12_000_000
    assert len(content["held_up_s"][0]) == len(content["copy_s"][0]) == 1


@needs_torch
def test_hooks_are_measured(tmp_path):
    only = "alone,empty,paceline,torch_noop"
    content = measure(tmp_path, "hook", "--only", only, python=warm_python("torch"))
    assert content["parameters"] == 300
    assert [row["case"] for row in content["rows"]] == only.split(",")


@needs_torch
def test_indices_are_counted(tmp_path):
    content = measure(tmp_path, "data", "--length", "100000", python=warm_python("torch"))
    found = {(row["task"], row["case"]): row["indices"] for row in content["rows"]}
    counts = {"start": 1, "bulk": 5000, "iterate": 1000, "loader": 100}
    assert found == {(task, way): n for task, n in counts.items() for way in ("paceline", "torch")}
