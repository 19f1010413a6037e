"""The Trainer of Transformers: its Accelerator told to use our class; and unchanged, with --replace-ddp."""

from __future__ import annotations

import json

import pytest

from tests.integrations.launched import (
    OURS,
    ROOT,
    TORCHS,
    assert_same_curve,
    ended,
    paceline_run,
    reports,
)

PROGRAM = "tests.integrations.transformers_program"
EXAMPLE = "examples/trainers/transformers_gpt.py"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What both ranks have found in all cases; one start of processes for all."""
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


def test_a_transformers_script_runs_unchanged_with_replace_ddp(tmp_path):
    """The example with the one line of Paceline's taken out."""
    lines = (ROOT / EXAMPLE).read_text().splitlines()
    plain = [line for line in lines if "paceline" not in line.partition("#")[0].lower()]
    script = tmp_path / "script.py"
    script.write_text("\n".join(plain))
    assert len(lines) - len(plain) >= 2
    command = [*paceline_run(), "--replace-ddp", str(script), "--epochs", "1", "--report", str(tmp_path)]
    done = ended(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("paceline: replaced torch.nn.parallel.DistributedDataParallel") == 1
    assert "warning: no model was wrapped" not in done.stderr
    report = json.loads((tmp_path / "0.json").read_text())
    assert report["wrapper"] == OURS
    assert report["losses"][-1] < report["losses"][0]
