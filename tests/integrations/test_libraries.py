"""Libraries that accept a wrapped model, or wrap it themselves, train the same with Paceline's class."""

from __future__ import annotations

import pytest

from tests.integrations.launched import OURS, TORCHS, assert_same_curve, paceline_run, reports

PROGRAM = "tests.integrations.libraries_program"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks with all libraries; one start of processes for all."""
    folder = tmp_path_factory.mktemp("libraries")
    return reports(folder, [*paceline_run(), "-m", PROGRAM, str(folder)])


def test_a_distributed_checkpoint_resumes_model_and_optimizer(trained):
    for rank in trained:
        theirs, ours = rank["checkpoint"]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["resumed"] == ours["losses"][-len(ours["resumed"]) :]  # bit by bit
        assert ours["names"] == theirs["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_torchmetrics_computes_over_all_ranks(trained):
    for rank in trained:
        theirs, ours = rank["metric"]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["metric"] == pytest.approx(theirs["metric"], rel=1e-4)
    assert trained[0]["metric"][1]["metric"] == trained[1]["metric"][1]["metric"]


def test_a_stateful_data_loader_goes_on_within_an_epoch(trained):
    for rank in trained:
        theirs, ours = rank["loader"]
        assert ours["losses"] == ours["whole"]  # as if it had never stopped
        assert len(ours["losses"]) == 12
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-5)


def test_ignites_engine_trains_and_evaluates(trained):
    for rank in trained:
        theirs, ours = rank["engine"]
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["metric"] == pytest.approx(theirs["metric"], rel=1e-4)


def test_ignites_auto_model_wraps_in_pacelines_class(trained):
    for rank in trained:
        theirs, ours = rank["auto_model"]
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])
