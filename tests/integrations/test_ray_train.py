"""Ray Train with `PacelineConfig`, and with torch's class replaced in its workers, beside Ray's own DDP."""

from __future__ import annotations

import sys

import pytest

from tests.integrations.launched import OURS, TORCHS, assert_same_curve, ended, report_of

PROGRAM = "tests.integrations.ray_train_program"
WITHIN_S = 1200  # twice, a controller and two workers import all of Ray Train and torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reports of both workers in all runs; one start of Ray for all."""
    made = tmp_path_factory.mktemp("ray_train")
    done = ended([sys.executable, "-m", PROGRAM, str(made)], WITHIN_S, RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_ray_train_trains_as_with_its_own_ddp(folder):
    found = [report_of(folder, f"config-{rank}") for rank in range(2)]
    for rank in found:
        theirs, ours = rank["theirs"], rank["ours"]
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])
    assert found[0]["ours"]["losses"] != found[1]["ours"]["losses"]


def test_ray_train_passes_arguments_on(folder):
    """`nonfinite` is an argument that only Paceline's class has."""
    for rank in range(2):
        found = report_of(folder, f"config-{rank}")
        assert found["arguments"] == found["ours"]


def test_ray_trains_workers_have_one_secret_that_is_in_no_environment(folder):
    (first, is_shown), (second, _) = (report_of(folder, f"config-{rank}")["secret"] for rank in range(2))
    assert len(first) == 64
    assert first == second
    assert not is_shown


def test_the_other_workers_of_ray_train_report_one_that_raises(folder):
    assert "Rank 1 of 2 raised" in report_of(folder, "config-0")["raised"]
    assert "ValueError: no such file: data.bin" in report_of(folder, "config-0")["raised"]


def test_the_first_version_of_ray_trains_api_is_refused(folder):
    said = (folder / "refused.txt").read_text()
    assert "needs the second version of Ray Train's API" in said
    assert "RAY_TRAIN_V2_ENABLED=0" in said


def test_the_example_of_ray_train_trains_with_the_class_replaced_in_its_workers(folder):
    for rank in range(2):
        report = report_of(folder, rank)
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.5 * report["losses"][0]
