"""Generated programs under Paceline and under references: some seeds, and all programs that have found a bug.

In separate processes, because the fuzzer forks its ranks. `make fuzz` runs more.
"""

from __future__ import annotations

import functools
import json

import pytest

from tests.differential.command import fuzz, run_every_mode

_MODES = (
    *("default", "tiny", "view", "tiny view", "unused", "unused view", "static", "backend", "gloo memory"),
    *("gloo", "gloo tiny view", "gloo unused"),
    *("hosts", "hosts tiny", "hosts tiny view", "hosts unused", "hosts static"),
    *("uneven tiny", "uneven view", "uneven unused", "uneven exact", "scatter", "scatter unused"),
)
_PLAIN = {
    "ranks": 2,
    "modes": ["default"],
    "models": [{"layers": [{"kind": "linear"}, {"kind": "scale"}, {"kind": "linear"}]}],
    "ops": [
        {"op": "wrap"},
        {"op": "optimizer"},
        *(
            op
            for data in range(3)
            for op in (
                {"op": "zero_grad"},
                {"op": "forward", "data": data},
                {"op": "backward"},
                {"op": "step"},
            )
        ),
    ],
}


_fuzz = functools.partial(fuzz, "torch")


@pytest.fixture
def plain(tmp_path):
    """A file with an ordinary program."""
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(_PLAIN))
    return str(file)


def test_programs_that_found_a_bug():
    status, output = _fuzz("--corpus")
    assert status == 0, output


def test_generated_programs():
    status, output = _fuzz("--seeds", "0:60", "--shrink-seconds", "10")
    assert status == 0 and "**Silent differences: 0.** Other findings: 0." in output, output


def test_every_mode_and_torchs_own_wrapper():
    run_every_mode("torch", range(33, 36), _MODES)


def test_an_unknown_difference_of_torchs_own_wrapper_is_a_finding(plain):
    status, output = _fuzz("--program", plain, "--mode", "torch", "--mutation", "torch averages nothing")
    assert status == 1 and "--- torch: in the framework's own wrapper: ranks differ" in output, output


def test_a_known_difference_of_torchs_own_wrapper_is_no_finding(tmp_path):
    again = {"op": "backward"}
    program = {**_PLAIN, "ops": [{"op": "wrap"}, {"op": "forward"}, {**again, "retain": True}, again]}
    file = tmp_path / "again.json"
    file.write_text(json.dumps(program))
    status, output = _fuzz("--program", str(file), "--mode", "torch")
    assert status == 0 and "ranks differ: a second backward is not averaged" in output, output
    status, output = _fuzz("--program", str(file), "--mode", "default")
    assert status == 0 and "--- default: equal" in output, output


_TRAIN = [{"op": "zero_grad"}, {"op": "forward"}, {"op": "backward"}, {"op": "step"}]
_LOCAL = [{"op": "forward", "no_sync": True}, {"op": "backward", "no_sync": True}]
_DIRECT = [{"op": "forward"}, {"op": "direct"}]


@pytest.mark.parametrize(
    ("ops", "error"),
    [
        ([{"op": "write", "values": [2.0, None]}, *_LOCAL, *_TRAIN[1:]], "ReplicasDifferError"),
        ([*_DIRECT, {"op": "try", "body": _TRAIN}, *_TRAIN], "RuntimeWarning"),
    ],
    ids=["local gradients of buffers that ranks have written apart", "a warning of drift that is caught"],
)
def test_what_comes_of_a_documented_error(tmp_path, ops, error):
    layers = [{"kind": "factor"}, {"kind": "linear"}]
    setup = [{"op": "wrap"}, {"op": "optimizer"}, *_TRAIN, {"op": "zero_grad"}]
    file = tmp_path / "refused.json"
    file.write_text(json.dumps({**_PLAIN, "models": [{"layers": layers}], "ops": [*setup, *ops]}))
    status, output = _fuzz("--program", str(file))
    assert status == 0 and f"--- default: refused {error}" in output, output


@pytest.mark.parametrize(
    ("mutation", "kind"),
    [
        ("skip a parameter", "ranks differ"),
        ("wrong mean on one rank", "ranks differ"),
        ("wrong mean everywhere", "wrong mean"),
        ("raise alone", "a rank went on alone"),
        ("hang", "hang"),
        ("die", "crash"),
    ],
)
def test_finds_injected_bugs(plain, mutation, kind):
    status, output = _fuzz("--program", plain, "--mutation", mutation, "--deadline", "3")
    assert status == 1 and f"--- default: {kind}" in output, output


def test_the_table_counts_silent_differences(tmp_path):
    arguments = ("--seeds", "3:5", "--shrink-seconds", "0", "--output", str(tmp_path))
    status, output = _fuzz(*arguments, "--mutation", "wrong mean everywhere")
    (file,) = tmp_path.iterdir()
    count = int(file.read_text().partition("**Silent differences: ")[2].partition(".")[0])
    assert status == 1 and count == output.count("=== wrong ") > 0, output


def test_a_seed_makes_the_same_program():
    first, second = (_fuzz("--seed", "5", "--show") for _ in range(2))
    assert first == second and first[0] == 0


def test_makes_a_failing_program_small(plain):
    status, output = _fuzz("--program", plain, "--mutation", "wrong mean everywhere", "--shrink")
    smallest = output.partition("smallest:")[2]
    assert status == 1 and smallest.count("backward(") == 1, output
