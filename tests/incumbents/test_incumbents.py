"""The list of torch's tests on Paceline is correct; `make incumbents` runs all of them."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.incumbents import outcomes
from tests.incumbents.outcomes import Part, Stop
from tests.incumbents.run import Outcome

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("outcomes.md")

STOP = Stop(("test_c",), "_mp_param", "reads `_mp_param`", "test_x", False)
PART = Part("ddp", ("test_a",), {"needs a GPU": ("test_b",)}, (STOP,))

SAMPLE = {
    "ddp": [
        "test_DistributedDataParallelCPU",
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_accumulate_gradients_no_sync",
        "test_ddp_grad_div_uneven_inputs",
        "test_ddp_ignore_params_arg",
        "test_ddp_broadcast_buffer_via_hook",  # stops
    ],
    "collectives": [
        "test_all_reduce_sum",
        "test_gather_object",
        "test_send_recv_any_source",
        "test_sparse_all_reduce_sum",
        "test_get_backend",  # stops
    ],
}


def test_what_is_as_listed() -> None:
    for name, outcome in (
        ("test_a", Outcome("passes", "", 1.0)),
        ("test_b", Outcome("skips", "needs a GPU", 1.0)),
        ("test_c", Outcome("stops", "AttributeError: no '_mp_param'", 1.0)),
    ):
        assert PART.unexpected(name, outcome) is None


@pytest.mark.parametrize(
    ("name", "outcome", "problem"),
    [
        (
            "test_a",
            Outcome("stops", "Traceback\nValueError: 1 is not 2", 1.0),
            "no reason is listed: ValueErr",
        ),
        ("test_a", Outcome("skips", "needs a GPU", 1.0), "skips, and is listed as one that passes"),
        ("test_b", Outcome("passes", "", 1.0), "passes, and is listed as one that skips"),
        ("test_c", Outcome("passes", "", 1.0), "passes, and is listed as one that stops"),
        (
            "test_c",
            Outcome("stops", "rank 1 was still running after 120 s", 1.0),
            "elsewhere than at '_mp_param'",
        ),
    ],
)
def test_what_is_not_as_listed(name: str, outcome: Outcome, problem: str) -> None:
    assert problem in (PART.unexpected(name, outcome) or "")


def test_tests_that_come_or_go_are_reported() -> None:
    known = {"ddp": PART}
    assert not outcomes.strangers(known, ["test_a", "test_b", "test_c"])
    (came,) = outcomes.strangers(known, ["test_a", "test_b", "test_c", "test_d"])
    (went,) = outcomes.strangers(known, ["test_a", "test_b"])
    assert "test_d has no line" in came and "torch has no such test" in went and "test_c" in went
    twice = outcomes.strangers({"ddp": PART, "again": PART}, ["test_a", "test_b", "test_c"])
    assert len(twice) == 3 and all("twice" in each for each in twice)


def test_the_page_has_the_tables_of_the_list() -> None:
    page = PAGE.read_text()
    for part in outcomes.parts().values():
        assert f"{part.count()}\n\n{part.table()}" in page, "python -m tests.incumbents --tables prints them"
    made = json.dumps(json.loads(outcomes.DATA.read_text()), indent=1) + "\n"
    assert outcomes.DATA.read_text() == made  # so that a change is a change of a line


IS_LISTED = importlib.metadata.version("torch").split("+")[0] == outcomes.version()


@pytest.mark.skipif(not IS_LISTED, reason="the list is about another version of torch")
def test_a_part_of_torchs_tests() -> None:
    names = [name for part in SAMPLE.values() for name in part]
    assert len(names) == len(set(names))
    command = [sys.executable, "-m", "tests.incumbents", "--jobs", "2", "--tests", *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ddp, paceline: 5 pass, 0 skip themselves, 1 stop" in run.stdout, run.stdout
    assert "collectives, paceline: 4 pass, 0 skip themselves, 1 stop" in run.stdout, run.stdout
