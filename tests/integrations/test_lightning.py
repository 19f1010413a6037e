"""Lightning's Trainer and Fabric with `strategy="paceline"`, beside their own DDP."""

from __future__ import annotations

import sys

import pytest

from tests.integrations.launched import OURS, ROOT, TORCHS, assert_same_curve, ended, paceline_run, reports

PROGRAM = "tests.integrations.lightning_program"
EXAMPLE = "examples/trainers/lightning_digits.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks in all cases; one start of processes for all."""
    folder = tmp_path_factory.mktemp("lightning")
    return reports(folder, [*paceline_run(), "-m", PROGRAM, str(folder)])


@pytest.mark.parametrize("case", ["automatic", "accumulated", "by hand", "partly", "fabric"])
def test_lightning_trains_as_with_its_own_ddp(trained, case):
    for rank in trained:
        ours, theirs = rank[case]["paceline"], rank[case]["ddp"]
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])
        if case not in ("by hand", "fabric"):
            assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-4)
    assert trained[0][case]["paceline"]["losses"] != trained[1][case]["paceline"]["losses"]


def test_lightning_keeps_running_statistics_in_step_when_optimizing_by_hand(trained):
    """With torch's class they drift apart there, so that the ranks' validation losses are not comparable."""
    theirs, ours = ([rank["by hand"][name]["running"] for rank in trained] for name in ("ddp", "paceline"))
    assert ours[0] == ours[1]
    assert theirs[0] != theirs[1]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)


def test_lightning_uses_a_communication_hook_on_the_cpu(trained):
    """Lightning's own strategy silently ignores the hook there."""
    for rank in trained:
        theirs, ours = rank["hook"]["ddp"], rank["hook"]["paceline"]
        assert theirs["calls"] == 0 < ours["calls"]
        # gradients are float16 between the ranks: close to the others, but not equal
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=0.02)
        assert ours["losses"][1:] != theirs["losses"][1:]


def test_lightnings_own_launcher_starts_the_ranks(tmp_path):
    command = [sys.executable, str(ROOT / EXAMPLE), "--epochs", "1", "--report", str(tmp_path)]
    for report in reports(tmp_path, command):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.5 * report["losses"][0]


def test_lightning_refuses_a_launcher_that_started_another_number_of_processes(tmp_path):
    """Without the check, Lightning would wait for ranks that never start."""
    command = [*paceline_run(), str(ROOT / EXAMPLE), "--devices", "3"]
    done = ended(command)
    assert done.returncode != 0
    assert "ConfigError" in done.stderr
    assert "3 processes: num_nodes=1 times 3 devices" in done.stderr
    assert "WORLD_SIZE=2" in done.stderr
