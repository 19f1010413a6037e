"""Accelerate with `use_paceline`, beside its own DDP."""

from __future__ import annotations

import pytest

from tests.integrations.launched import (
    OURS,
    ROOT,
    TORCHS,
    accelerate_launch,
    assert_same_curve,
    paceline_run,
    reports,
)

PROGRAM = "tests.integrations.accelerate_program"
EXAMPLE = "examples/trainers/accelerate_digits.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks in all cases; one start of processes for all."""
    folder = tmp_path_factory.mktemp("accelerate")
    return reports(folder, [*paceline_run(), "-m", PROGRAM, str(folder)])


@pytest.mark.parametrize("case", ["automatic", "accumulated", "hook", "triggered late"])
def test_accelerate_trains_as_with_torchs_ddp(trained, case):
    for rank in trained:
        theirs, ours = rank[case]
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])
    assert trained[0][case][1]["losses"] != trained[1][case][1]["losses"]


def test_accelerate_prepares_once_unwraps_and_saves_as_with_torchs_ddp(trained):
    for rank in trained:
        theirs, ours = rank["automatic"]
        assert ours["unwrapped"] == theirs["unwrapped"] == "Sequential"
        assert ours["again"] is theirs["again"] is True
        assert ours["state"] == theirs["state"]


def test_wrong_calls_of_use_paceline_raise_on_every_rank(trained):
    for rank in trained:
        late, unknown, other, twice = rank["refused"]
        assert "has prepared a model already" in late
        assert "does not have: non_finite" in unknown and "nonfinite" in unknown
        assert "takes an accelerate.Accelerator" in other
        assert "use_paceline was called twice" in twice


def test_accelerate_launch_starts_the_ranks(tmp_path):
    command = [*accelerate_launch(), str(ROOT / EXAMPLE)]
    for report in reports(tmp_path, [*command, "--epochs", "1", "--report", str(tmp_path)]):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.5 * report["losses"][0]
