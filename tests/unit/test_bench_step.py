"""What the step bench says of its samples."""

from __future__ import annotations

import pytest

from paceline.bench.contest import Timing
from paceline.bench.rounds import Interval
from paceline.bench.step import overhead_cells, overheads


def test_overhead_is_over_alone():
    timings = {
        "alone": Timing(1, [[1.0, 1.0], [1.0, 1.0]]),
        "torch": Timing(1, [[1.5, 1.5], [1.0, 1.0]]),
    }
    assert overheads(timings)["torch"].median == 0.5
    assert overheads({"torch": timings["torch"]}) == {}


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (Interval(1e-3, 0.5e-3, 2e-3), Interval(5e-3, 4e-3, 6e-3), "5.0x"),
        # Can't be told from nothing: only a bound.
        (Interval(1e-3, -1e-3, 2e-3), Interval(5e-3, 4e-3, 6e-3), "> 2.5x"),
        (Interval(-2e-3, -3e-3, -1e-3), Interval(5e-3, 4e-3, 6e-3), "no overhead"),
        # A torch that can't be told from nothing either gives no ratio.
        (Interval(1e-3, 0.5e-3, 2e-3), Interval(5e-3, -1e-3, 6e-3), "-"),
        (Interval(1e-3, 0.5e-3, 2e-3), None, "-"),
    ],
)
def test_ratios_claim_no_more_than_the_samples_show(ours, theirs, says):
    assert overhead_cells("paceline", ours, theirs)[-1] == says


def test_torch_has_no_ratio_to_itself():
    some = Interval(1e-3, 0.5e-3, 2e-3)
    assert overhead_cells("torch", some, some)[-1] == "-"
