"""Small runs of the examples, as a user starts them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.harness import needs_paddle
from tests.harness.warm import warm_python

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sklearn") is None:  # not imported here: that takes seconds, in each test worker
    pytest.skip("scikit-learn is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str) -> str:
    """Run a command that must succeed; return its output."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def digits(launcher: list[str], folder: Path, *options: str) -> tuple[dict[str, object], dict[str, object]]:
    """Run digits.py; return its report and its weights."""
    report, weights = folder / "report.json", folder / "weights.pt"
    files = ["--report", str(report), "--save", str(weights)]
    run(*launcher, str(EXAMPLES / "digits.py"), "--epochs", "1", *files, *options)
    return json.loads(report.read_text()), torch.load(weights, weights_only=True)


def paceline_run(python: str = sys.executable) -> list[str]:
    return [python, "-m", "paceline", "run", "-n", "2"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Started as by a user, like torch's DDP below. Other tests start processes with torch imported."""
    return digits(paceline_run(), tmp_path_factory.mktemp("two_ranks"))


def assert_same_weights(some, others):
    assert some.keys() == others.keys()
    for name, weights in some.items():
        torch.testing.assert_close(
            weights, others[name], rtol=0, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_several_processes_train_the_same_model_as_one(two_ranks, tmp_path):
    report, several = two_ranks
    _, alone = digits([warm_python("torch")], tmp_path)
    assert report["replicas_are_identical"] is True
    assert_same_weights(several, alone)


def test_digits_runs_with_torchs_ddp_and_gets_the_same_model(two_ranks, tmp_path):
    _, theirs = digits(paceline_run(), tmp_path, "--ddp", "torch")
    assert_same_weights(two_ranks[1], theirs)


def test_the_model_of_the_demo_is_the_same_on_several_processes(tmp_path):
    python = warm_python("torch")
    options = ["--model", "gru", "--batch", "120", "--lr", "0.3"]
    report, several = digits(paceline_run(python), tmp_path, *options)
    _, alone = digits([python], tmp_path, *options)
    assert report["replicas_are_identical"] is True
    assert_same_weights(several, alone)


def test_digits_refuses_a_batch_that_can_not_be_shared():
    command = [*paceline_run(warm_python("torch")), str(EXAMPLES / "digits.py"), "--batch", "5"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1
    assert "--batch 5 can't be shared equally by 2 processes" in ended.stdout + ended.stderr


@needs_paddle
def test_paddle_digits_trains_the_model_of_one_process(tmp_path):
    found = []
    python = warm_python("paddle")
    for launcher in (paceline_run(python), [python]):
        report, weights = tmp_path / "report.json", tmp_path / "weights.npz"
        files = ["--report", str(report), "--save", str(weights)]
        run(*launcher, str(EXAMPLES / "paddle_digits.py"), "--epochs", "1", *files)
        assert json.loads(report.read_text())["replicas_are_identical"] is True
        found.append(dict(np.load(weights)))
    several, alone = found
    assert several.keys() == alone.keys()
    for name, weights in several.items():
        np.testing.assert_allclose(weights, alone[name], rtol=0, atol=2e-5, err_msg=name)
