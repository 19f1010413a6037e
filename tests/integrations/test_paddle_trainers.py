"""hapi's paddle.Model and fleet with Paceline's class instead of paddle.DataParallel, beside Paddle's own."""

from __future__ import annotations

import pytest

from tests.integrations.launched import assert_same_curve, paceline_run, reports

PROGRAM = "tests.integrations.paddle_program"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks in both cases; one start of processes."""
    folder = tmp_path_factory.mktemp("paddle")
    return reports(folder, [*paceline_run(), "-m", PROGRAM, str(folder)])


@pytest.mark.parametrize("case", ["hapi", "fleet"])
def test_paddles_trainers_train_as_with_its_own_class(trained, case):
    for rank in trained:
        theirs, ours = rank[case]
        assert ours["wrapper"] == "paceline.paddle.ddp.parallel"
        assert theirs["wrapper"].startswith("paddle.")
        assert_same_curve(ours["losses"], theirs["losses"])
    assert trained[0][case][1]["losses"] != trained[1][case][1]["losses"]


def test_hapi_evaluates_with_running_statistics_that_are_in_step(trained):
    """Paddle's class leaves the ranks out of step in fit(), so that each rank evaluates another model."""
    theirs, ours = ([rank["hapi"][number] for rank in trained] for number in (0, 1))
    assert ours[0]["running"] == ours[1]["running"]
    assert theirs[0]["running"] != theirs[1]["running"]
    assert ours[0]["running"] == pytest.approx(theirs[0]["running"], rel=1e-5)
    assert ours[0]["evaluation"] == pytest.approx(theirs[0]["evaluation"], rel=1e-4)
