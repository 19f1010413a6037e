"""Generated programs on a device, beside references on the CPU; see docs/design/testing.md."""

from __future__ import annotations

import json

import pytest

from tests import accelerator
from tests.device import LAG_US
from tests.differential.command import fuzz

pytestmark = accelerator.needed
_STEP = [{"op": "zero_grad"}, {"op": "forward"}, {"op": "backward"}, {"op": "step"}]
_PLAIN = {
    "ranks": 2,
    "models": [{"layers": [{"kind": "linear"}, {"kind": "scale"}, {"kind": "linear"}]}],
    "ops": [{"op": "wrap"}, {"op": "optimizer"}, *_STEP, *_STEP, *_STEP],
}


def test_generated_programs():
    status, output = fuzz("torch", "--seeds", "0:60", "--shrink-seconds", "10")
    assert status == 0 and "**Silent differences: 0.** Other findings: 0." in output, output


@pytest.mark.parametrize("mode", ["device", "device view", "device hosts"])
def test_a_device_that_does_not_wait_for_the_means_is_found(tmp_path, mode, monkeypatch):
    monkeypatch.setenv(LAG_US, "5000")
    file = tmp_path / "plain.json"
    file.write_text(json.dumps({**_PLAIN, "modes": [mode]}))
    assert fuzz("torch", "--program", str(file))[0] == 0
    status, output = fuzz("torch", "--program", str(file), "--mutation", "streams do not wait")
    assert status == 1, output
