"""The known differences of a framework's own wrapper, in hand-written programs."""

from __future__ import annotations

import pytest

from tests.differential.differences import (
    A_FORWARD_INSIDE,
    A_FORWARD_OUTSIDE,
    A_SECOND_BACKWARD,
    orders_of,
    until,
)
from tests.differential.torch_differences import incumbents_of, known_difference


def _program(*ops, layers=("linear",)):
    return {"models": [{"layers": [{"kind": kind} for kind in layers]}], "ops": [dict(op) for op in ops]}


def _op(name, **arguments):
    return {"op": name, **arguments}


_STEP = (_op("zero_grad"), _op("forward"), _op("backward"), _op("step"))


@pytest.mark.parametrize(
    ("ops", "features"),
    [
        ((*_STEP, *_STEP), set()),
        ((_op("forward"), _op("backward", retain=True), _op("backward")), {A_SECOND_BACKWARD}),
        ((_op("forward", to="a"), _op("forward", to="b"), _op("backward", of=["a", "b"])), set()),
        (
            (
                _op("forward", to="a"),
                _op("forward", to="b"),
                _op("backward", of=["a"]),
                _op("backward", of=["b"]),
            ),
            {A_SECOND_BACKWARD},
        ),
        ((_op("forward", no_sync=True), _op("backward", no_sync=True), *_STEP), set()),
        ((_op("forward"), _op("backward", no_sync=True)), {A_FORWARD_OUTSIDE}),
        (
            (_op("forward", to="a"), _op("forward", to="b", no_sync=True), _op("backward", of=["b"])),
            {A_FORWARD_INSIDE},
        ),
        ((_op("forward", to="b", no_sync=True), _op("backward", of=["b"])), set()),
        (
            (
                _op("forward", to="a"),
                _op("forward", to="b", model=1),
                _op("backward", of=["b"]),
                _op("backward", of=["a"]),
            ),
            set(),
        ),
    ],
)
def test_features_of_the_order_of_forwards_and_backwards(ops, features):
    assert orders_of(_program(*ops)) == features


@pytest.mark.parametrize(("at", "count"), [("", 3), ("0", 1), ("1#2 model 0", 2), ("1.4 model 1", 2)])
def test_the_program_until_an_op(at, count):
    assert len(until(_program(*_STEP[:3]), at)["ops"]) == count


def test_an_ordinary_program_has_no_known_difference():
    assert known_difference(_program(_op("wrap"), *_STEP, *_STEP), "") is None


def test_what_comes_later_explains_nothing():
    program = _program(_op("wrap"), *_STEP, _op("freeze"), *_STEP)
    assert known_difference(program, "3 model 0") is None
    assert known_difference(program, "8 model 0") is not None


def test_programs_that_torchs_own_wrapper_cannot_run():
    assert incumbents_of(_program(*_STEP)) == ["torch"]
    assert incumbents_of(_program(*_STEP, layers=("linear", "gate"))) == ["torch unused"]
    assert incumbents_of(_program(_op("iterate", how="join", body=_STEP))) == ["torch"]
    assert incumbents_of(_program(_op("iterate", body=[*_STEP]))) == []
    assert incumbents_of(_program(*_STEP, _op("weight"))) == []
