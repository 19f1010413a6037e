"""The Trainer of Transformers, its Accelerator configured for Paceline's class, beside torch's DDP."""

from __future__ import annotations

import pytest

from tests.integrations.launched import OURS, TORCHS, assert_same_curve, paceline_run, reports

PROGRAM = "tests.integrations.transformers_program"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of both ranks in all cases; one start of processes for all."""
    folder = tmp_path_factory.mktemp("transformers")
    return reports(folder, [*paceline_run(), "-m", PROGRAM, str(folder)])


@pytest.mark.parametrize("case", ["plain", "accumulated"])
def test_transformers_trains_as_with_torchs_ddp(trained, case):
    for rank in trained:
        theirs, ours = rank[case]
        assert (ours["wrapper"], theirs["wrapper"]) == (OURS, TORCHS)
        assert_same_curve(ours["losses"], theirs["losses"])
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-3)
        assert ours["evaluation"] == pytest.approx(theirs["evaluation"], rel=1e-4)
