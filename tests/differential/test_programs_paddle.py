"""Generated programs under Paceline for Paddle: some seeds, and all programs that have found a bug.

`make fuzz FRAMEWORK=paddle` runs more.
"""

from __future__ import annotations

import functools
import importlib.util
import json

import pytest

from tests.differential.command import fuzz, run_every_mode
from tests.harness import ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="PaddlePaddle is not installed"
)

_MODES = (
    *("default", "tiny", "view", "tiny view", "unused", "unused one bucket", "unused view", "static"),
    *("group", "group tiny view", "group unused", "group static", "bfloat16 sums", "group float64 sums"),
    *("hosts", "hosts tiny view", "hosts unused", "hosts static"),
)


_fuzz = functools.partial(fuzz, "paddle")


_STEP = ({"op": "clear"}, {"op": "forward"}, {"op": "backward"}, {"op": "step"})
_PLAIN = {
    "ranks": 2,
    "modes": ["default"],
    "models": [{"layers": [{"kind": "linear"}, {"kind": "scale"}, {"kind": "linear"}]}],
    "ops": [{"op": "wrap"}, {"op": "optimizer"}, *_STEP, *_STEP],
}
"""An ordinary program."""


@pytest.fixture
def write(tmp_path):
    """Writes a program to a file."""

    def write(program):
        file = tmp_path / "program.json"
        file.write_text(json.dumps(program))
        return str(file)

    return write


def _outcomes(output):
    """The verdicts of one program, by mode."""
    lines = (line.removeprefix("--- ").strip() for line in output.splitlines() if line.startswith("--- "))
    return dict(line.split(": ", 1) for line in lines)


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


@pytest.mark.parametrize(
    ("mutation", "wrong", "right"),
    [
        ("wrong mean everywhere", ["default", "hosts"], []),
        ("wrong sum over a group", ["group", "group static"], ["default", "static", "hosts", "hosts static"]),
        ("wrong cast", ["bfloat16 sums", "group float64 sums"], ["default", "group"]),
    ],
)
def test_finds_a_bug_that_is_put_in(write, mutation, wrong, right):
    status, output = _fuzz("--program", write({**_PLAIN, "modes": wrong + right}), "--mutation", mutation)
    expected = dict.fromkeys(wrong, "wrong mean") | dict.fromkeys(right, "equal")
    assert status == 1 and _outcomes(output) == expected, output


def test_finds_a_wrong_mean_of_who_has_data_within_join(write):
    loop = {"op": "iterate", "how": "join", "counts": [1, 3], "body": list(_STEP)}
    file = write({**_PLAIN, "modes": ["default", "group"], "ops": [*_PLAIN["ops"], loop, *_STEP]})
    status, output = _fuzz("--program", file)
    assert status == 0 and _outcomes(output) == dict.fromkeys(("default", "group"), "equal"), output
    status, output = _fuzz("--program", file, "--mutation", "join counts who has data")
    assert status == 1 and set(_outcomes(output).values()) == {"wrong parameters"}, output


def test_finds_a_wrong_mean_of_a_parameter_behind_complex_numbers(write):
    layers = [{"kind": "complex", "view": view} for view in ("real", "imag", "product", "square", "abs")]
    file = write({**_PLAIN, "modes": ["default", "view", "group"], "models": [{"layers": layers}]})
    status, output = _fuzz("--program", file)
    assert status == 0 and set(_outcomes(output).values()) == {"equal"}, output
    status, output = _fuzz("--program", file, "--mutation", "wrong mean everywhere")
    assert status == 1 and "0:layers.4.pairs: element 0" in output, output


@pytest.mark.parametrize("values", [[2.0, None], [None, 2.0], [2.0, 3.0]])
def test_finds_buffers_that_ranks_have_written_apart(write, values):
    modes = ["default", "group"]
    ops = [*_PLAIN["ops"], {"op": "write", "values": values}, *_STEP]
    file = write({**_PLAIN, "modes": modes, "models": [{"layers": [{"kind": "factor"}]}], "ops": ops})
    status, output = _fuzz("--program", file)
    assert status == 0 and _outcomes(output) == dict.fromkeys(modes, "refused RuntimeWarning"), output
    status, output = _fuzz("--program", file, "--mutation", "reports no writes")
    assert status == 1 and _outcomes(output) == dict.fromkeys(modes, "wrong mean"), output


def test_a_promise_of_a_static_graph_is_held_to(write):
    layers = [{"kind": "gate", "after": 1, "layers": [{"kind": "scale"}]}]
    modes = ["static", "group static", "hosts static"]
    status, output = _fuzz("--program", write({**_PLAIN, "modes": modes, "models": [{"layers": layers}]}))
    assert status == 0 and _outcomes(output) == dict.fromkeys(modes, "refused GraphChangedError"), output


def test_every_mode_and_paddles_own_wrapper():
    run_every_mode("paddle", range(5, 7), _MODES)
