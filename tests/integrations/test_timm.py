"""timm's utilities, combined as in its training script, with torch's DDP and with Paceline's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integrations.launched import OURS, ROOT, TORCHS, assert_same_curve, paceline_run, reports

VISION = {"PYTHONPATH": str(Path(sys.prefix) / "torchvision")}  # scripts/integrations-venv
CPUS = ["-m", "tests.integrations.torchvision_for_cpus"]
PROGRAM = str(ROOT / "tests" / "integrations" / "timm_program.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks in both variants; one start of processes for all."""
    folder = tmp_path_factory.mktemp("timm")
    return reports(folder, [*paceline_run(), *CPUS, PROGRAM, str(folder)], **VISION)


@pytest.mark.parametrize("way", ["script", "task"])
def test_timm_trains_as_with_torchs_ddp(trained, way):
    for rank in trained:
        theirs, ours = rank[way]
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["means"] == pytest.approx(theirs["means"], rel=2e-5)
        assert ours["average"] == pytest.approx(theirs["average"], rel=2e-5)
    assert trained[0][way][1]["losses"] != trained[1][way][1]["losses"]


def test_timms_running_statistics_are_in_step(trained):
    """In "script", timm sends those of rank 0 to all ranks; in "task", it averages those of the ranks."""
    for first, second in zip(trained[0]["script"], trained[1]["script"], strict=True):
        assert first["statistics"] == second["statistics"]
    theirs, ours = trained[0]["script"]
    assert ours["statistics"] == pytest.approx(theirs["statistics"], rel=1e-4, abs=1e-5)
    assert trained[0]["task"][1]["statistics"] == trained[1]["task"][1]["statistics"]


def test_the_example_of_timm_trains(tmp_path):
    example = str(ROOT / "examples" / "trainers" / "timm_digits.py")
    command = [*paceline_run(), "--replace-ddp", *CPUS, example, "--epochs", "1", "--report", str(tmp_path)]
    for report in reports(tmp_path, command, **VISION):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.7 * report["losses"][0]
