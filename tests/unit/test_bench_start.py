"""`paceline bench start`, with programs that need no framework."""

from __future__ import annotations

import pytest

from paceline.bench import start
from paceline.bench.contest import Plan

IMPORTTIME = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   torch._C
import time:      2000 |       2100 | torch
import time:         7 |          7 |     decimal
import time:        30 |         37 |   paceline.env
import time:        40 |         77 | paceline.torch
warning: something else
"""


def test_import_times_are_read_with_their_depth():
    assert start.parse_import_times(IMPORTTIME) == [
        start.Import("torch._C", 100e-6, 100e-6, 1),
        start.Import("torch", 2000e-6, 2100e-6, 0),
        start.Import("decimal", 7e-6, 7e-6, 2),
        start.Import("paceline.env", 30e-6, 37e-6, 1),
        start.Import("paceline.torch", 40e-6, 77e-6, 0),
    ]


@pytest.fixture
def without_torch(monkeypatch):
    """The contest of one process that starts and ends."""
    monkeypatch.setattr(start, "ENTRIES", (start._entry("paceline", "nothing", "none", "import"),))
    monkeypatch.setattr(start, "no_torch", lambda: "")
    monkeypatch.setattr("paceline.bench.contest.no_torch", lambda: "")
    monkeypatch.setattr(start, "_imports", lambda: start.parse_import_times(IMPORTTIME))
    return lambda program: monkeypatch.setattr(start, "_PROGRAMS", {"import": program})


def test_each_start_is_timed_and_the_imports_are_told(without_torch):
    without_torch('import time; time.sleep(0.05); print("wrapped")\n')
    report = start.run(Plan(2, 3, (), "paceline bench start", lambda line: None))
    assert report.is_complete
    assert len(report.data["rows"]["paceline"]) == 3
    assert all(sample["seconds"] >= 0.05 for sample in report.data["rows"]["paceline"])
    (told,) = [note for note in report.notes if "importtime" in note]
    assert "torch 2.1 ms" in told or "torch 2.10 ms" in told
    assert "2 modules of its own 70" in told
    assert "1 others 7" in told


@pytest.mark.parametrize(
    ("program", "why"),
    [("print('something else')", "it said nothing"), ("raise SystemExit('no group')", "no group")],
)
def test_a_program_that_does_not_wrap_is_not_timed(without_torch, program, why):
    without_torch(program)
    report = start.run(Plan(2, 3, (), "paceline bench start", lambda line: None))
    assert not report.is_complete
    assert report.data["rows"]["paceline"] == []
    assert any(why in note for note in report.notes)
