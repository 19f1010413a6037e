"""Texts of the errors that a backward can end in: names, ranks, and fields for programs."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, GraphChangedError
from paceline.reducer.backward_errors import (
    check_refused,
    check_twice,
    nonfinite_error,
    skipped_error,
    unused_error,
)
from paceline.reducer.reducer_interface import BackwardStatus

PLAIN, FINISHED, INTERRUPTED = (
    BackwardStatus(1),
    BackwardStatus(finished=True),
    BackwardStatus(interrupted=True),
)
NAMES = ["embed.weight", "fc.weight", "fc.bias", "head.weight"]


def test_unused_parameters_are_named_with_their_ranks() -> None:
    error = unused_error([[], [3], [1, 3]], NAMES)
    text = str(error)
    assert text.startswith("2 of 4 parameters got no gradient on ranks 1-2 of 3.")
    assert "rank 2: fc.weight" in text and "ranks 1-2: head.weight" in text
    assert "find_unused_parameters=True" in text
    assert error.unused == {"fc.weight": (2,), "head.weight": (1, 2)}


def test_unused_on_all_ranks_does_not_blame_a_branch() -> None:
    assert "another branch" not in str(unused_error([[0], [0]], NAMES))
    assert "any of the 2 ranks" in str(unused_error([[0], [0]], NAMES))


def test_long_lists_are_shortened_in_the_text_only() -> None:
    names = [f"layer{i}.weight" for i in range(50)]
    error = unused_error([range(50), []], names)
    assert "layer4.weight and 45 more" in str(error)
    assert len(error.unused) == 50


def test_many_combinations_of_ranks_are_shortened() -> None:
    error = unused_error(
        [[i for i in range(16) if i >> rank & 1] for rank in range(4)], [str(i) for i in range(16)]
    )
    assert "... and 7 more combinations of ranks" in str(error)


def test_nonfinite_names_rank_and_parameters() -> None:
    error = nonfinite_error([(2, 1), (2, 0), (0, 1)], NAMES, world_size=4)
    text = str(error)
    assert text.startswith("The gradient holds an infinity or a NaN on ranks 0, 2 of 4.")
    assert "ranks 0, 2: fc.weight" in text and "rank 2: embed.weight" in text
    assert error.nonfinite == {0: ("fc.weight",), 2: ("embed.weight", "fc.weight")}


def test_a_sum_that_overflows_blames_no_rank() -> None:
    error = nonfinite_error([], NAMES, world_size=4, overflowed=[2, 1])
    text = str(error)
    assert text.startswith("The sum of the gradients over 4 ranks overflowed, though each is finite.")
    assert "not their sum: fc.weight, fc.bias" in text
    assert (error.nonfinite, error.overflowed) == ({}, ("fc.weight", "fc.bias"))
    both = nonfinite_error([(0, 3)], NAMES, world_size=4, overflowed=[1])
    assert "on rank 0 of 4" in str(both) and "not their sum: fc.weight" in str(both)


def test_a_skipped_backward_names_the_odd_rank_out() -> None:
    error = skipped_error([PLAIN, PLAIN, BackwardStatus(2), PLAIN])
    assert str(error).startswith("Rank 2 of 4 skipped")
    assert "rank 2: 2 forwards since" in str(error) and "ranks 0-1, 3: 1 forward since" in str(error)
    assert error.ranks == (2,)


def test_an_interrupted_backward_has_its_own_error() -> None:
    error = skipped_error([PLAIN, INTERRUPTED])
    assert "The backward of rank 1 of 2 ended in an exception" in str(error)
    assert error.ranks == (1,)


def test_a_refused_gradient_is_reported_to_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        check_refused([FINISHED, BackwardStatus(refused=1), PLAIN, BackwardStatus(twice=3)], NAMES)
    assert str(caught.value).startswith("The gradient of 'fc.weight' cannot be averaged on rank 1 of 4.")
    check_refused([PLAIN, FINISHED, INTERRUPTED, BackwardStatus(twice=0)], NAMES)
    check_twice([PLAIN, BackwardStatus(refused=1)], NAMES)


def test_a_gradient_that_came_twice_is_reported_to_ranks_without_data_too() -> None:
    with pytest.raises(GraphChangedError) as caught:
        check_twice([FINISHED, BackwardStatus(twice=1), PLAIN, BackwardStatus(twice=3)], NAMES)
    text = str(caught.value)
    assert text.startswith(
        "The gradient of 'fc.weight, head.weight' came twice in one backward, on ranks 1, 3 of 4"
    )
    assert "rank 1: fc.weight" in text and "rank 3: head.weight" in text
    assert caught.value.changed == ("fc.weight", "head.weight")
    check_twice([PLAIN, FINISHED, INTERRUPTED], NAMES)
