"""What the throughput bench says of its samples."""

from __future__ import annotations

import pytest

from paceline.bench.contest import Plan, Timing
from paceline.bench.throughput import MODELS, Speed, _Measured, entries, run, speed
from paceline.errors import ConfigError


def test_the_slowest_rank_decides_how_fast_all_are():
    timing = Timing(1, [[0.1, 0.1, 0.4], [0.1, 0.2, 0.4]])
    assert speed(timing, 64) == Speed(320.0, 160.0, 640.0)


def test_a_rank_by_itself_is_compared_by_its_part_of_the_batch():
    timings = {
        "one": Timing(1, [[0.8, 0.8]]),
        "solo": Timing(1, [[0.4, 0.4]]),
        "torch": Timing(1, [[1.0, 1.0], [0.9, 1.0]]),
        "paceline": Timing(1, [[0.4, 0.5], [0.5, 0.5]]),
    }
    waits = [{"optimizer_s": 0.1, "waited_s": 0.02}, {"optimizer_s": 0.2, "waited_s": 0.0}]
    measured = _Measured(64, 2, timings, {"paceline": waits, "torch": [{"optimizer_s": 1, "waited_s": None}]})
    assert measured.faster("paceline", "one").median == pytest.approx(1.6)
    assert measured.faster("paceline", "torch").median == pytest.approx(2.0)
    # Two ranks by themselves would handle 160 samples a second, and these two handle 128.
    assert measured.of_ideal("paceline") == pytest.approx(0.8)
    assert measured.of_ideal("one") == pytest.approx(0.5)
    assert measured.faster("paceline", "zero") is None
    assert (measured.optimizer_s("paceline"), measured.waited_s("paceline")) == (0.2, 0.01)
    assert measured.waited_s("torch") is None


def test_a_batch_that_cannot_be_cut_evenly_is_refused():
    plan = Plan(3, 1, (), "", print)
    with pytest.raises(ConfigError, match="rl: 64"):
        run(plan, list(MODELS))


def test_contenders_have_different_names_and_each_its_part():
    found = {entry.key: entry for entry in entries(4)}
    assert len(found) == len(entries(4)) == len({entry.label for entry in found.values()})
    assert found["solo"].options == {"parts": 4, "threads": 1}
    assert (found["one"].processes, found["solo"].processes, found["alone"].processes) == (1, 1, 0)
