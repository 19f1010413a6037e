"""DistributedSampler: the samples of each rank, epochs, and the source of the rank."""

from __future__ import annotations

import sys
import tracemalloc
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DistributedSampler
from paceline.errors import ConfigError

lengths = st.integers(0, 10**5) | st.integers(0, 60)
worlds = st.integers(1, 17)


def shares(length: int, world_size: int, **options: object) -> list[list[int]]:
    samplers = [
        DistributedSampler(range(length), world_size, rank, seed=3, **options) for rank in range(world_size)
    ]
    drawn = [list(sampler) for sampler in samplers]
    assert [len(share) for share in drawn] == [
        len(DistributedSampler(range(length), world_size, rank, **options)) for rank in range(world_size)
    ]
    return drawn


def counts_of(drawn: list[list[int]], length: int) -> np.ndarray:
    return np.bincount(np.concatenate([np.array(share, np.int64) for share in drawn]), minlength=length)


@given(lengths, worlds, st.booleans())
@settings(max_examples=40, deadline=None)
def test_padded_shares_cover_everything(length: int, world_size: int, shuffle: bool) -> None:
    drawn = shares(length, world_size, shuffle=shuffle)
    assert len({len(share) for share in drawn}) == 1
    counts = counts_of(drawn, length)
    assert counts.sum() == -(-length // world_size) * world_size
    if length >= world_size:
        assert set(counts) <= {1, 2} and (counts == 2).sum() < world_size
    elif length:
        assert counts.min() >= 1


@given(lengths, worlds, st.booleans())
@settings(max_examples=40, deadline=None)
def test_without_padding_every_sample_comes_once(length: int, world_size: int, shuffle: bool) -> None:
    drawn = shares(length, world_size, shuffle=shuffle, pad=False)
    assert counts_of(drawn, length).tolist() == [1] * length
    sizes = [len(share) for share in drawn]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(lengths, worlds, st.booleans())
@settings(max_examples=40, deadline=None)
def test_shares_with_drop_last_are_disjoint(length: int, world_size: int, shuffle: bool) -> None:
    drawn = shares(length, world_size, shuffle=shuffle, drop_last=True)
    assert len({len(share) for share in drawn}) == 1
    counts = counts_of(drawn, length)
    assert counts.sum() == length // world_size * world_size and set(counts) <= {0, 1}


@given(st.integers(0, 300), worlds)
@settings(max_examples=40, deadline=None)
def test_global_batches_are_those_of_one_process(length: int, world_size: int) -> None:
    drawn = shares(length, world_size, drop_last=True)
    (alone,) = shares(length, 1)
    interleaved = [index for step in zip(*drawn, strict=True) for index in step]
    assert interleaved == alone[: len(interleaved)]


@given(st.integers(1, 500), worlds)
@settings(max_examples=20, deadline=None)
def test_without_shuffling_it_is_torchs(length: int, world_size: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    for drop_last in (False, True):
        for rank in range(world_size):
            options = {"num_replicas": world_size, "rank": rank, "shuffle": False, "drop_last": drop_last}
            torchs = data.DistributedSampler(range(length), **options)
            ours = DistributedSampler(range(length), **options)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs)


def test_set_epoch_chooses_and_repeats() -> None:
    sampler = DistributedSampler(range(100), 2, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_epochs_move_on_by_themselves() -> None:
    alone, chosen = DistributedSampler(range(100), 2, 0), DistributedSampler(range(100), 2, 0)
    backwards = []
    for epoch in range(3):
        chosen.set_epoch(epoch)
        backwards.append(list(alone))
        assert backwards[-1] == list(chosen)
        assert alone.epoch == epoch
    assert backwards[0] != backwards[1] != backwards[2]


def test_epochs_stay_as_set() -> None:
    sampler = DistributedSampler(range(100), 2, 0, reshuffle=False)
    assert list(sampler) == list(sampler)
    assert sampler.epoch == 0


def test_an_iterator_that_is_never_used_costs_no_epoch() -> None:
    sampler = DistributedSampler(range(100), 2, 0)
    iter(sampler)
    assert list(sampler) == list(DistributedSampler(range(100), 2, 0))


def test_seeds_and_epochs_do_not_add_up() -> None:
    one, other = DistributedSampler(range(100), 1, 0, seed=0), DistributedSampler(range(100), 1, 0, seed=1)
    one.set_epoch(1)
    assert list(one) != list(other)


def test_a_million_of_10_to_the_12_take_no_memory() -> None:
    sampler = DistributedSampler(range(10**12), 8, 3)
    tracemalloc.start()
    try:
        largest = max(islice(sampler, 10**6))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 10**12 * 0.99 < largest < 10**12
    assert peak < 1 << 20
    assert len(set(islice(sampler, 10**5))) == 10**5


def test_an_empty_data_set_gives_nothing() -> None:
    for options in ({}, {"pad": False}, {"drop_last": True}, {"shuffle": False}):
        sampler = DistributedSampler([], 3, 1, **options)
        assert (list(sampler), len(sampler)) == ([], 0)


def test_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = DistributedSampler(range(9), shuffle=False)
    assert list(sampler) == [1, 4, 7]
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="half set: RANK is not set"):
        DistributedSampler(range(9))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="does not know its rank"):
        DistributedSampler(range(9))


def test_torchs_group_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 2, get_world_size=lambda: 3
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=group))
    assert list(DistributedSampler(range(9), shuffle=False)) == [2, 5, 8]
    assert list(DistributedSampler(range(9), rank=0, shuffle=False)) == [0, 3, 6]
    group.is_initialized = lambda: False
    assert list(DistributedSampler(range(9), shuffle=False)) == [0, 4, 8]


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 2), (2, -1), (-1, None)])
def test_out_of_range_is_refused(ranks: int, rank: int | None) -> None:
    with pytest.raises(ConfigError, match=r"(num_replicas|rank)=-?[0-9] is not usable"):
        DistributedSampler(range(9), ranks, rank)


def test_negative_epochs_and_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="epoch=-1 is not usable"):
        DistributedSampler(range(9), 1, 0).set_epoch(-1)
    with pytest.raises(ConfigError, match="contradict"):
        DistributedSampler(range(9), 1, 0, drop_last=True, pad=False)
