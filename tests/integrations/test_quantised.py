"""Adapters over quantised weights (torchao, PEFT) train as in one process.

torch's own class refuses Int8 weights, and quantises NF4 weights once more when it broadcasts them.
"""

from __future__ import annotations

import pytest

from tests.integrations.launched import OURS, ROOT, assert_same_curve, paceline_run, reports

PROGRAM = "tests.integrations.quantised_program"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks with all models; one start of processes for all."""
    folder = tmp_path_factory.mktemp("quantised")
    return reports(folder, [*paceline_run(), "-m", PROGRAM, str(folder)])


@pytest.mark.parametrize("model", ["torchao_nf4", "torchao_int8", "peft_over_int8"])
def test_adapters_over_quantised_weights_train_as_in_one_process(trained, model):
    for rank in trained:
        assert_same_curve(rank[model]["memory"], rank[model]["alone"])
        assert_same_curve(rank[model]["group"], rank[model]["alone"])


def test_the_example_of_adapters_trains(tmp_path):
    example = str(ROOT / "examples" / "trainers" / "adapters_digits.py")
    for report in reports(tmp_path, [*paceline_run(), example, "--epochs", "1", "--report", str(tmp_path)]):
        assert report["wrapper"] == OURS
        assert report["losses"][-1] < 0.8 * report["losses"][0]
