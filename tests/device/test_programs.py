"""Generated programs on a device, compared with references on the CPU; see docs/design/testing.md."""

from __future__ import annotations

import json

import pytest

from tests import accelerator
from tests.device import LAG_US, paddle
from tests.differential.command import fuzz

_IS_THERE = {
    "torch": accelerator.needed,
    "paddle": pytest.mark.skipif(not paddle.IS_THERE, reason="needs the device of Paddle"),
}
_CLEARS = {"torch": "zero_grad", "paddle": "clear"}
_FOUND = [
    *(("torch", mode, "streams do not wait") for mode in ("device", "device view", "device hosts")),
    # With Paddle the statuses follow the buckets on one stream: waiting for them waits for all.
    *(("paddle", mode, "wrong sum over a group") for mode in ("device", "device view")),
]


def plain(framework, mode):
    """Three steps of a small model."""
    step = [{"op": _CLEARS[framework]}, {"op": "forward"}, {"op": "backward"}, {"op": "step"}]
    return {
        "ranks": 2,
        "models": [{"layers": [{"kind": "linear"}, {"kind": "scale"}, {"kind": "linear"}]}],
        "ops": [{"op": "wrap"}, {"op": "optimizer"}, *step, *step, *step],
        "modes": [mode],
    }


@pytest.mark.parametrize(
    "framework", [pytest.param(each, marks=is_there) for each, is_there in _IS_THERE.items()]
)
def test_generated_programs(framework):
    status, output = fuzz(framework, "--seeds", "0:60", "--shrink-seconds", "10")
    assert status == 0 and "**Silent differences: 0.** Other findings: 0." in output, output


@pytest.mark.parametrize(
    ("framework", "mode", "mutation"),
    [pytest.param(*each, marks=_IS_THERE[each[0]], id=f"{each[0]}, {each[1]}") for each in _FOUND],
)
def test_a_bug_is_found(tmp_path, framework, mode, mutation, monkeypatch):
    monkeypatch.setenv(LAG_US, "5000")
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(plain(framework, mode)))
    assert fuzz(framework, "--program", str(file))[0] == 0
    status, output = fuzz(framework, "--program", str(file), "--mutation", mutation)
    assert status == 1, output
