"""Generated programs under Paceline for Paddle: some seeds, and all that found a bug once.

`make fuzz FRAMEWORK=paddle` runs more.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.harness import ranks
from tests.harness.command import run_module
from tests.harness.warm import warm_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="PaddlePaddle is not installed"
)

_DEADLINE_S = 300


def _fuzz(*arguments: str) -> tuple[int, str]:
    arguments = ("--framework", "paddle", *arguments)
    python = warm_python("paddle")
    return run_module("tests.differential", *arguments, deadline_s=_DEADLINE_S, python=python)


@pytest.fixture
def plain(tmp_path):
    """A file with a program in which nothing is special."""
    step = ({"op": "clear"}, {"op": "forward"}, {"op": "backward"}, {"op": "step"})
    layers = [{"kind": "linear"}, {"kind": "scale"}, {"kind": "linear"}]
    file = tmp_path / "plain.json"
    file.write_text(
        json.dumps(
            {
                "ranks": 2,
                "modes": ["default"],
                "models": [{"layers": layers}],
                "ops": [{"op": "wrap"}, {"op": "optimizer"}, *step, *step],
            }
        )
    )
    return str(file)


def test_programs_that_found_a_bug():
    status, output = _fuzz("--corpus")
    assert status == 0, output


def test_generated_programs():
    status, output = _fuzz("--seeds", "0:30", "--shrink-seconds", "10")
    assert status == 0, output


@ranks(1, group=None)
def test_what_the_reference_assumes_of_recomputation(rank: int) -> None:
    """In Paddle alone: a recomputation changes running statistics a second time, so a backward does."""
    import paddle
    from paddle.distributed.fleet.utils import recompute

    for is_reentrant in (False, True):
        norm = paddle.nn.BatchNorm1D(1, momentum=0.5)
        x = paddle.full([2, 1], 8.0)
        x.stop_gradient = False
        y = recompute(norm, x, use_reentrant=is_reentrant).sum()
        assert norm._mean.item() == 4
        y.backward()
        assert norm._mean.item() == 6


def test_finds_a_bug_that_is_put_in(plain):
    status, output = _fuzz("--program", plain, "--mutation", "wrong mean everywhere", "--deadline", "10")
    assert status == 1 and "--- default: wrong mean" in output, output
