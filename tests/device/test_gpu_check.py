"""The programs of `make gpu-check` on the test device: its branches, and the launches of a step."""

from __future__ import annotations

import json
import os

import pytest

from tests import accelerator
from tests.device import LAG_US
from tests.device.torch import NAME
from tests.gpu.parts import Part, run_parts

pytestmark = [
    accelerator.needed,
    pytest.mark.skipif(accelerator.IS_CUDA, reason="a GPU is there, and needs no stand-in"),
]
WITHIN_S = 600.0


@pytest.fixture(autouse=True)
def no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, LAG_US, "0")


def run(part: Part) -> None:
    (ended,) = run_parts([part], WITHIN_S, lambda line: None)
    assert ended.is_good, f"{ended.summary}\n{ended.tail}"


def test_every_branch_of_start_up():
    run(Part("first", ("-m", "tests.gpu.first", "--device", NAME), WITHIN_S, ranks=1))


def test_launches_of_a_step_are_counted(tmp_path):
    result = tmp_path / "result.json"
    command = ["-m", "tests.gpu.steps", "--model", "gpt", "--form", "tiny", "--device", NAME]
    command += ["--backend", "nccl", "--rounds", "1", "--sample-s", "0.001", "--losses", "3"]
    command += ["--no-optimizer", "--ways", "alone,torch,torch_view,paceline,paceline_view"]
    run(Part("steps", (*command, "--result", str(result)), WITHIN_S, ranks=1))
    found = json.loads(result.read_text())
    added = {key: count - found["launches"]["alone"] for key, count in found["launches"].items()}
    tensors = found["tensors"]
    # torch copies each gradient into its bucket and back, and reduces the bucket; with views it scales each.
    assert added["torch"] == pytest.approx(2 * tensors + 1, abs=2)
    assert added["torch_view"] == pytest.approx(tensors + 1, abs=2)
    assert 0 < added["paceline_view"] <= added["paceline"] <= added["torch"] / 2
    differences = [found["differences"][key] for key in ("torch_view", "paceline", "paceline_view")]
    assert max(differences) < 1e-4
