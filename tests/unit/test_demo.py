"""What examples/demo.py says of its runs, which tests/pages/test_examples.py makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_of_examples", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def said(demo: ModuleType, ours: list[float], alone: list[float], theirs: list[float]) -> str:
    framework = demo.FRAMEWORKS["torch"]
    runs = [[demo.Run(0.98, speed, True, {}) for speed in speeds] for speeds in (ours, alone, theirs)]
    return demo.conclusion(framework, demo.ways_of(framework, 2, 2), runs)


def test_it_pays_only_if_every_round_says_so(demo: ModuleType) -> None:
    pays = said(demo, [150, 160, 170], [100, 100, 100], [80, 80, 80])
    assert pays.startswith("It pays here: 2 processes train 1.60x (1.50 to 1.70) as fast as one process")
    assert "They train 2.00x (1.88 to 2.12) as fast as with torch's DDP." in pays
    unsure = said(demo, [150, 160, 90], [100, 100, 100], [80, 200, 80])
    assert unsure.startswith("Whether it pays here can't be told: 2 processes reach 1.50x (0.90 to 1.60)")
    assert "Against torch's DDP: 1.12x (0.80 to 1.88)." in unsure
    assert said(demo, [80, 81, 82], [100] * 3, [50] * 3).startswith(
        "It does not pay here: 2 processes reach 0.81x"
    )
    assert said(demo, [200, 200], [100, 100], [50, 50]).startswith(
        "Fewer than 3 rounds tell nothing for sure"
    )


def test_a_round_that_was_slow_for_all_counts_as_any(demo: ModuleType) -> None:
    ratio = demo.ratio(*[[demo.Run(1, speed, True, {}) for speed in each] for each in ([30, 300], [20, 200])])
    assert str(ratio) == "1.50x"


def test_runs_of_other_bits_are_told(demo: ModuleType) -> None:
    one, other = (demo.Run(1, 1, True, {"weight": np.array([value], np.float32)}) for value in (0.0, -0.0))
    assert demo.same_bits([one, one])
    assert not demo.same_bits([one, other])
