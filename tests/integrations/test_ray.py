"""`paceline.ray.run` on a real cluster of two nodes, which Ray starts on this machine."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.integrations.launched import ended

PROGRAM = "tests.integrations.ray_program"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The reports of all runs; one cluster for all."""
    folder = tmp_path_factory.mktemp("ray")
    done = ended([sys.executable, "-m", PROGRAM, str(folder)], RAY_USAGE_STATS_ENABLED="0")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


def test_workers_of_two_nodes_are_ranks_in_blocks(found):
    places = found["places"]
    assert [each["rank"] for each in places] == [0, 1, 2, 3]
    nodes = [each["node"] for each in places]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [each["local"] for each in places] == [["0", "2"], ["1", "2"]] * 2
    assert {each["sum"] for each in places} == {2 * (1 + 2 + 3 + 4)}


def test_a_run_that_a_signal_stops_is_resumed_by_the_same_call(found):
    runs = found["preempted"]
    assert runs["status"] == 75
    assert [began for began, *_ in runs["resumed"]] == ["4"] * 4  # the step whose backward reported it
    assert [weights for _, *weights in runs["resumed"]] == [weights for _, *weights in runs["undisturbed"]]


def test_the_workers_have_a_secret_that_is_in_no_environment(found):
    for each in found["places"]:
        assert each["has secret"]
        assert not each["secret in environment"]


def test_a_worker_that_raises_is_named_with_its_traceback_alone(found):
    raised = found["raised"]
    assert (raised["kind"], raised["rank"]) == ("LaunchError", 2)
    assert raised["text"].startswith("Rank 2 of 4 failed first: ValueError: no such file: data.bin\n")
    assert "raising, node " in raised["text"]
    assert raised["traceback"].startswith("Traceback (most recent call last):\n")
    assert "in raising" in raised["traceback"].splitlines()[1]  # no frame of Ray, nor of Paceline
    assert "\x1b[" not in raised["text"]


def test_a_worker_that_dies_is_named_and_not_one_that_lost_it(found):
    died = found["died"]
    assert (died["kind"], died["rank"]) == ("LaunchError", 2)
    assert died["text"].startswith("Rank 2 of 4 failed first: its process has ended\n")
    assert "The actor died" in died["text"]  # Ray's own text, with the causes that it knows
    # Ray may stop another rank before that rank reports its error.
    assert re.search(r"ranks? (0|1|3|0-1|0, 3|1, 3|0-1, 3): PeerLostError: Rank 2 of 4 died", died["text"])


def test_a_result_that_cannot_be_pickled_is_reported_with_its_rank(found):
    assert found["not sent"]["rank"] == 1
    assert "Rank 1 of 2 failed first: what it returned could not be sent" in found["not sent"]["text"]
    assert "cannot pickle '_thread.lock'" in found["not sent"]["text"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "too many",
            ["no room for 5 workers of 1 CPU each", "in all: 4 CPU", "the nodes hold 4 of the 5 workers"],
        ),
        (
            "too large",
            ["no room for 1 worker of 3 CPU.", "no node has 3 CPU for one worker: the largest"],
        ),
        ("no such thing", ["2 workers of 1 CPU, 1 FPGA each", "no node has 1 FPGA for one worker: none has"]),
    ],
)
def test_missing_resources_of_the_cluster_are_reported_at_the_deadline(found, name, words):
    assert found[name]["kind"] == "ConfigError"
    for each in words:
        assert each in found[name]["text"]


def test_nothing_is_left_behind(found):
    assert found["processes"] == 8
    assert found["are gone"]
    for name in ("raised", "died", "not sent", "too many", "too large", "no such thing"):
        assert found[name]["free again"], name
