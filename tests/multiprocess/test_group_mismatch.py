"""Ranks that make different calls: all raise, naming each rank's call, and the group stays usable."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline.errors import ConfigError, MismatchError
from tests.harness import kept_ranks

_LARGE = 300_000

# The call of ranks 0 and 2, that of rank 1, and the error's text about each.
DISAGREEMENTS = [
    (lambda g: g.all_reduce(np.ones(3)), lambda g: g.all_reduce(np.ones(4)), "float64 x 3", "float64 x 4"),
    (
        lambda g: g.all_reduce(np.ones(4, "f4")),
        lambda g: g.all_reduce(np.ones(4, "i4")),
        r"float32 x 4",
        r"int32 x 4",
    ),
    (
        lambda g: g.all_reduce(np.ones(_LARGE), "sum"),
        lambda g: g.all_reduce(np.ones(_LARGE), "max"),
        r"x 300000, sum",
        r"x 300000, max",
    ),
    (
        lambda g: g.reduce(np.ones(3), 0),
        lambda g: g.reduce(np.ones(3), 1),
        r"reduce\(float64 x 3, sum, root 0\)",
        "root 1",
    ),
    (lambda g: g.all_reduce(np.ones(3)), lambda g: g.reduce(np.ones(3)), "all_reduce", r"reduce\("),
    (
        lambda g: g.broadcast(np.ones(3)),
        lambda g: g.broadcast(np.ones(_LARGE)),
        "24 bytes, root 0",
        "2400000 bytes",
    ),
    (
        lambda g: g.all_gather(np.ones(3)),
        lambda g: g.gather(np.ones(3)),
        r"all_gather\(24 bytes\)",
        r"gather\(24 bytes, root 0\)",
    ),
    (
        lambda g: g.scatter(np.ones((3, 2)), np.ones(2)),
        lambda g: g.scatter(None, np.ones(1)),
        "scatter.16 bytes",
        "scatter.8 bytes",
    ),
    (
        lambda g: g.reduce_scatter(np.ones((3, 2))),
        lambda g: g.all_to_all(np.ones((3, 2))),
        "reduce_scatter",
        "all_to_all",
    ),
    (
        lambda g: g.all_to_all(np.ones((3, 2))),
        lambda g: g.all_to_all(np.ones((3, 4))),
        "rank 0 sends 16 bytes to rank 1",
        "expects 32",
    ),
    (lambda g: g.barrier(), lambda g: g.allocate(10), "barrier", "allocate.40 bytes"),
    (lambda g: g.allocate(10), lambda g: g.allocate(11), "allocate.40 bytes", "allocate.44 bytes"),
    (lambda g: g.barrier(), lambda g: g.all_reduce(np.ones(3)), "barrier, call #", "all_reduce"),
]


@kept_ranks(3)
def test_every_kind_of_disagreement(group):
    for number, (usual, odd, usual_text, odd_text) in enumerate(DISAGREEMENTS):
        with pytest.raises(MismatchError) as caught:
            (odd if group.rank == 1 else usual)(group)
        error = caught.value
        assert error.rank == group.rank
        text = str(error)
        for pattern in (usual_text, odd_text):
            assert re.search(pattern, text), (number, pattern, text)
        if number != 9:  # all_to_all's sizes are reported per pair of ranks
            assert "ranks 0, 2: " in text and "rank 1: " in text
        total = np.full(1 + number * 9000, 1.0)
        group.all_reduce(total)
        assert_array_equal(total, 3)


@kept_ranks(2)
def test_an_extra_call_is_detected_in_the_next_call(group):
    group.all_reduce(np.ones(3))
    if group.rank == 0:
        with pytest.raises(MismatchError, match=r"(?s)rank 0: all_reduce.*call #2.*rank 1: barrier, call #2"):
            group.all_reduce(np.ones(3))
    else:
        with pytest.raises(MismatchError):
            group.barrier()
    group.barrier()


@kept_ranks(2)
def test_wrong_arguments_are_refused_before_the_call_begins(group):
    square = np.zeros((4, 4))
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for call, problem in (
        (lambda: group.all_reduce(square.T), "C-contiguous"),
        (lambda: group.all_reduce(square[:, 1]), "C-contiguous"),
        (lambda: group.broadcast(square[::2, ::2]), "C-contiguous"),
        (lambda: group.all_gather(square.T), "C-contiguous"),
        (lambda: group.all_reduce(frozen), "read-only"),
        (lambda: group.broadcast(frozen, 1 - group.rank), "read-only"),
        (lambda: group.all_reduce([1.0, 2.0]), "numpy array"),
        (lambda: group.all_reduce(np.zeros(3, complex)), "can't reduce an array of this type"),
        (lambda: group.all_reduce(np.zeros(3, ">f4")), "foreign byte order"),
        (lambda: group.all_reduce(np.zeros(3, np.uint32)), "can't reduce an array of this type"),
        (lambda: group.all_reduce(np.zeros(3, np.int32), "mean"), "floating type"),
        (lambda: group.all_reduce(np.zeros(3), "average"), "op='average' is not usable"),
        (lambda: group.all_reduce(np.zeros(3), weight=2.0), "only a mean is weighted"),
        (lambda: group.reduce(np.zeros(3), root=2), "0 to 1"),
        (lambda: group.broadcast(np.zeros(3), root=-1), "0 to 1"),
        (lambda: group.gather(np.zeros(3), root=9), "0 to 1"),
        (lambda: group.reduce_scatter(np.zeros((3, 2))), "one block per rank"),
        (lambda: group.all_to_all(np.array(3.0)), "one block per rank"),
        (lambda: group.all_gather(np.zeros(3), np.zeros((2, 4))), "out does not fit"),
        (lambda: group.reduce_scatter(np.zeros((2, 4)), np.zeros(4, "f4")), "out does not fit"),
        (lambda: group.scatter(np.zeros((3, 2)), np.zeros(2), group.rank), "does not fit"),
        (lambda: group.scatter(None, np.zeros(2), group.rank), "array=None is not usable"),
        (lambda: group.subgroup([]), "at least one"),
        (lambda: group.subgroup([0, 0]), "different"),
        (lambda: group.subgroup([0, 2]), "0 to 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            call()
    # Inputs may be read-only, and collectives that do not reduce accept any dtype.
    assert group.all_gather(frozen).shape == (2, 4)
    group.broadcast(np.zeros(3, [("a", "U4"), ("b", ">f4")]))
    assert_array_equal(group.all_to_all(np.array([["a"], ["b"]]))[:, 0], ["ab"[group.rank]] * 2)
