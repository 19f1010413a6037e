"""All programs of `make gpu-check` on a CPU, so that the first run on a GPU finds no misspelt name."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.harness.command import run_module
from tests.harness.warm import warm_python


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_trial_on_a_cpu(tmp_path):
    result = tmp_path / "found.json"
    arguments = ("--device", "cpu", "--small", "--no-tests", "--limit-s", "1100")
    status, output = run_module(
        "tests.gpu",
        *(*arguments, "--output", str(tmp_path), "--json", str(result)),
        deadline_s=1150.0,
        python=warm_python("torch"),
    )
    assert status == 0, output
    content = json.loads(result.read_text())
    assert content["is_complete"] is True
    assert [part["status"] for part in content["parts"]] == ["ok"] * 6
    benches = {(each["model"], each["world_size"]): each for each in content["benches"]}
    assert set(benches) == {("toy", 1), ("cnn", 1), ("gpt", 1), ("toy", 2), ("cnn", 2)}
    for model in ("toy", "cnn"):  # a single rank does all that several do: reports and buffers, too
        assert benches[model, 1]["collectives"] == benches[model, 2]["collectives"]
    for each in benches.values():
        assert all(len(times) == each["world_size"] for times in each["steps_s"].values())
        # On a CPU one rank's sums have a fixed order, and a sum of two values has only one.
        differences = {key: each["differences"][key] for key in each["differences"] if key != "alone"}
        assert max(differences.values()) < 1e-5
    (written,) = tmp_path.glob("gpu_cpu*.md")
    assert "Paceline, bucket view" in written.read_text()
