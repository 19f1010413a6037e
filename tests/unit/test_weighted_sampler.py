"""WeightedDistributedSampler: probabilities, exactly-once draws, and agreement between ranks; and subsets."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DistributedSampler, SubsetDistributedSampler, WeightedDistributedSampler
from paceline.data.order import derive_key
from paceline.data.weighted import logarithm, uniform
from paceline.errors import ConfigError

some_weights = st.lists(st.sampled_from([0.0, 1e-9, 0.5, 1.0, 3.0, 1e9]), min_size=1, max_size=60).filter(any)


def draws(
    weights: list[float], world_size: int, count: int | None = None, **options: object
) -> list[list[int]]:
    return [
        list(WeightedDistributedSampler(weights, count, num_replicas=world_size, rank=rank, **options))
        for rank in range(world_size)
    ]


@given(some_weights, st.integers(1, 17))
@settings(max_examples=40, deadline=None)
def test_ranks_together_draw_what_one_would(weights: list[float], world_size: int) -> None:
    shares = draws(weights, world_size, 200, pad=False)
    (alone,) = draws(weights, 1, 200)
    assert [shares[i % world_size][i // world_size] for i in range(200)] == alone
    assert all(weights[i] > 0 for i in alone)


@given(some_weights, st.integers(1, 17))
@settings(max_examples=40, deadline=None)
def test_without_replacement_each_positive_weight_comes_once(weights: list[float], world_size: int) -> None:
    positive = [i for i, weight in enumerate(weights) if weight > 0]
    shares = draws(weights, world_size, len(positive), replacement=False, pad=False)
    assert sorted(i for share in shares for i in share) == positive
    some = draws(weights, 1, len(positive) // 2, replacement=False)[0]
    (whole,) = draws(weights, 1, len(positive), replacement=False)
    assert some == whole[: len(some)]


def test_frequencies_with_replacement() -> None:
    weights = [0.0, 1.0, 2.0, 3.0, 0.0, 4.0, 0.0]
    counts = np.bincount(draws(weights, 1, 100_000)[0], minlength=7)
    expected = np.array(weights) / 10 * 100_000
    positive = expected > 0
    assert (counts[~positive] == 0).all()
    assert (((counts - expected)[positive] ** 2) / expected[positive]).sum() < 25  # 3 degrees; 1e-5


def test_frequencies_of_orders_without_replacement() -> None:
    """An order's probability is the product of each weight over those that are left."""
    weights = [1.0, 2.0, 5.0]
    sampler = WeightedDistributedSampler(weights, None, False, num_replicas=1, rank=0)
    trials = 6000
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(trials):
        order = tuple(sampler)
        counts[order] = counts.get(order, 0) + 1
    statistic = 0.0
    for order in permutations(range(3)):
        left, probability = 8.0, 1.0
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        statistic += (counts[order] - trials * probability) ** 2 / (trials * probability)
    assert statistic < 30  # 5 degrees; 1e-5


def test_epochs_and_states() -> None:
    def sampler(world_size: int, rank: int) -> WeightedDistributedSampler:
        return WeightedDistributedSampler(range(1, 101), num_replicas=world_size, rank=rank, pad=False)

    one = sampler(1, 0)
    first, second = list(one), list(one)
    assert first != second
    half = iter(two := sampler(2, 0))
    for _ in range(30):
        next(half)
    two.commit(20)
    rest = [sampler(3, rank) for rank in range(3)]
    for resumed in rest:
        resumed.load_state_dict(two.state_dict())
    parts = [list(resumed) for resumed in rest]
    assert [parts[i % 3][i // 3] for i in range(60)] == first[40:]
    other = WeightedDistributedSampler(range(2, 102), num_replicas=1, rank=0)
    with pytest.raises(ConfigError, match="data set differs"):
        other.load_state_dict(two.state_dict())


def test_logarithm_and_uniform() -> None:
    x = np.concatenate([np.logspace(-16, 0, 1001), [2.0**-53, 0.5, math.sqrt(0.5), 1.0]])
    assert np.allclose(logarithm(x), np.log(x), rtol=1e-14, atol=1e-15)
    points = uniform(np.arange(100_000), derive_key(1))
    assert points.min() >= 0 and points.max() < 1
    counts = np.bincount((points * 100).astype(int), minlength=100)
    assert ((counts - 1000) ** 2 / 1000).sum() < 170  # 99 degrees; 1e-5


@pytest.mark.parametrize(
    ("weights", "options", "what"),
    [
        ([1, -1], {}, r"weights\[1\] = -1"),
        ([1, math.nan], {}, r"weights\[1\] = nan"),
        ([math.inf], {}, "inf"),
        ([0, 0], {}, "sum of 0.0"),
        ([[1, 2]], {}, "shape"),
        ([1, 0], {"replacement": False}, "at most 1"),
        ([1], {"num_samples": -1}, "num_samples=-1"),
        ([], {"num_samples": 1}, "out of range"),
    ],
)
def test_bad_weights_are_refused(weights: list[float], options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        WeightedDistributedSampler(weights, num_replicas=1, rank=0, **options)


def test_no_weights_no_draws() -> None:
    assert list(WeightedDistributedSampler([], num_replicas=2, rank=1)) == []


# --- subsets ---


@given(st.lists(st.integers(0, 10**9), max_size=200), st.integers(1, 17))
@settings(max_examples=40, deadline=None)
def test_a_subset_is_dealt_out_once(indices: list[int], world_size: int) -> None:
    drawn = [
        i
        for rank in range(world_size)
        for i in SubsetDistributedSampler(indices, world_size, rank, pad=False)
    ]
    assert sorted(drawn) == sorted(indices)
    in_order = SubsetDistributedSampler(np.array(indices, np.int32), world_size, 0, shuffle=False)
    places = list(DistributedSampler(range(len(indices)), world_size, 0, shuffle=False))
    assert list(in_order) == [indices[place] for place in places]


def test_states_of_other_subsets_are_refused() -> None:
    state = SubsetDistributedSampler([3, 4, 5], 1, 0).state_dict()
    SubsetDistributedSampler((3, 4, 5), 1, 0).load_state_dict(state)
    with pytest.raises(ConfigError, match="the data set differs"):
        SubsetDistributedSampler([3, 4, 6], 1, 0).load_state_dict(state)


@pytest.mark.parametrize("indices", [[-1], [0.5], [True, False], [[1, 2]]])
def test_bad_indices_are_refused(indices: list[object]) -> None:
    with pytest.raises(ConfigError, match="whole numbers, 0 or more"):
        SubsetDistributedSampler(indices, 1, 0)
