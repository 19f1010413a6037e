"""The computed permutation: against its definition, on every instruction set; and no worse than numpy's."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from paceline import _core
from paceline.data.order import Shuffled, derive_key
from tests.unit.permutation_oracle import permutation

LENGTHS = (1_000, 10_000, 100_000, 1_000_000)
keys = st.integers(0, 2**64 - 1)


def whole(length: int, key: int) -> npt.NDArray[np.int64]:
    return Shuffled(length, key).at(0, 1, length)


@given(st.integers(0, 10**5), keys)
@settings(max_examples=60, deadline=None)
def test_every_index_comes_once(length: int, key: int) -> None:
    assert_array_equal(np.sort(whole(length, key)), np.arange(length))


@given(st.integers(1, 2**63), keys, st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_what_the_definition_says(length: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    indices = Shuffled(length, key).map(np.array(places, np.int64))
    assert indices.tolist() == permutation(length, key, places)


@pytest.mark.parametrize("length", [5, 4096, 4097, 4099, 65_536, 65_537, 10**12, 2**62 + 3, 2**63])
@pytest.mark.parametrize("stride", [1, 3, 4])
def test_places_may_be_strided_and_any_instruction_set_agrees(length: int, stride: int) -> None:
    count = min(1500, length // stride)
    start = length - (count - 1) * stride - 1
    expected = permutation(length, 11, [start + i * stride for i in range(count)])
    shuffled = Shuffled(length, 11)
    try:
        for isa in _core.ISAS.values():
            if _core.set_isa(isa):
                assert shuffled.at(start, stride, count).tolist() == expected
    finally:
        _core.set_isa(_core.best_isa())


def test_places_beyond_the_end_and_other_arrays_are_refused() -> None:
    permutation_of_10 = _core.Permutation(10, 0)
    with pytest.raises(IndexError):
        permutation_of_10.fill(np.empty(3, np.int64), 4, 3)
    with pytest.raises(IndexError):
        permutation_of_10.fill(np.empty(3, np.int64), 0, 2**63)
    with pytest.raises(IndexError):
        permutation_of_10.map(np.array([-1]))
    with pytest.raises(TypeError):
        permutation_of_10.fill(np.empty(3, np.int32), 0, 1)
    with pytest.raises(ValueError, match="2\\*\\*63"):
        _core.Permutation(2**63 + 1, 0)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(length: int) -> None:
    orders = list(itertools.permutations(range(length)))
    draws = 200 * len(orders)
    counts = Counter(tuple(whole(length, derive_key(1, i)).tolist()) for i in range(draws))
    assert set(counts) == set(orders)
    assert_plausible(chi_square(np.array(list(counts.values()))), len(orders) - 1)


# --- quality. Each statistic of ours and of numpy's must lie where chance would put it: within 5 sigma. ---


def chi_square(counts: npt.NDArray[np.int64]) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


def assert_plausible(statistic: float, degrees: int) -> None:
    sigmas = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert abs(sigmas) < 5, f"chi-square {statistic:.0f} of {degrees} degrees: {sigmas:.1f} sigma"


def correlation(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> float:
    """In standard deviations of independent values."""
    return float(np.corrcoef(a, b)[0, 1] * np.sqrt(len(a)))


def orders_of(length: int) -> list[npt.NDArray[np.int64]]:
    """Some of ours and one of numpy's, by which the tests themselves are judged."""
    ours = [whole(length, derive_key(0, epoch)) for epoch in range(3)]
    return [*ours, np.random.default_rng(5).permutation(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_neighbours_are_unrelated(length: int) -> None:
    """The images of a place and the next (and further ones): in a grid of 16 x 16 cells, and correlated."""
    for order in orders_of(length):
        cells = order * 16 // length
        for lag in (1, 2, 7, 8, 64, 512):
            pairs = np.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256)
            # Without the 2 x 15 degrees of the margins, which a permutation fixes.
            assert_plausible(chi_square(pairs), 225)
            assert abs(correlation(order[:-lag], order[lag:])) < 5


@pytest.mark.parametrize("length", LENGTHS)
def test_steps_between_neighbours_are_even(length: int) -> None:
    """A weak hash would show in the differences first: neighbours differ in one digit."""
    for order in orders_of(length):
        steps = np.diff(order) % length
        assert_plausible(chi_square(np.bincount(steps * 100 // length, minlength=100)), 99)


@pytest.mark.parametrize("length", LENGTHS)
def test_place_epoch_seed_and_rank_predict_nothing(length: int) -> None:
    first = whole(length, derive_key(0, 0))
    for other in (np.arange(length), whole(length, derive_key(0, 1)), whole(length, derive_key(1, 0))):
        assert abs(correlation(first, other)) < 5
        table = np.bincount(first * 16 // length * 16 + other * 16 // length, minlength=256)
        assert_plausible(chi_square(table), 225)
    two = first[: length // 2 * 2].reshape(-1, 2)
    assert abs(correlation(two[:, 0], two[:, 1])) < 5


def test_fixed_points_and_digits() -> None:
    """Fixed points are as many as by chance (Poisson, mean 1), and both digits of the network well mixed."""
    fixed = [int((whole(10_000, derive_key(7, i)) == np.arange(10_000)).sum()) for i in range(300)]
    assert abs(np.mean(fixed) - 1) < 5 / np.sqrt(300)
    first_hundred = np.concatenate([whole(10_000, derive_key(8, i))[:100] for i in range(300)])
    for digit in (first_hundred // 100, first_hundred % 100):
        assert_plausible(chi_square(np.bincount(digit, minlength=100)), 99)


def test_it_takes_no_memory_and_no_time_to_start() -> None:
    started = time.thread_time()
    for i in range(100):
        Shuffled(10**12, i).at(10**11, 8, 4096)
    assert time.thread_time() - started < 1
