"""The plain sampler: shares are disjoint, equally long, and together the global batches of one process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import DistributedSampler
from paceline.data.sampler import rank_indices
from paceline.errors import ConfigError

sizes = st.tuples(st.integers(0, 60), st.integers(1, 7))


def shares(length: int, world_size: int, **options: bool) -> list[list[int]]:
    samplers = [
        DistributedSampler(range(length), world_size, rank, seed=3, **options) for rank in range(world_size)
    ]
    drawn = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(share) for share in drawn]
    return drawn


@given(sizes)
def test_padded_shares_cover_everything(size: tuple[int, int]) -> None:
    length, world_size = size
    drawn = shares(length, world_size)
    assert len({len(share) for share in drawn}) == 1
    counts = np.bincount(np.concatenate(drawn).astype(int), minlength=length)
    assert counts.sum() == len(drawn[0]) * world_size
    if length >= world_size:
        assert set(counts) <= {1, 2} and (counts == 2).sum() < world_size


@given(sizes)
def test_shares_with_drop_last_are_disjoint(size: tuple[int, int]) -> None:
    length, world_size = size
    drawn = shares(length, world_size, drop_last=True)
    everything = [index for share in drawn for index in share]
    assert len(set(everything)) == len(everything) == length // world_size * world_size


@given(sizes)
def test_global_batches_are_those_of_one_process(size: tuple[int, int]) -> None:
    length, world_size = size
    drawn = shares(length, world_size, drop_last=True)
    (alone,) = shares(length, 1)
    interleaved = [index for step in zip(*drawn, strict=True) for index in step]
    assert interleaved == alone[: len(interleaved)]


def test_epochs_differ_and_repeat() -> None:
    sampler = DistributedSampler(range(100), 2, 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_without_shuffle_the_order_is_kept() -> None:
    indices = [
        rank_indices(5, rank, 2, seed=0, epoch=0, shuffle=False, drop_last=False).tolist() for rank in (0, 1)
    ]
    assert indices == [[0, 2, 4], [1, 3, 0]]


def test_rank_and_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    sampler = DistributedSampler(range(9), shuffle=False)
    assert list(sampler) == [1, 4, 7]
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="does not know its rank"):
        DistributedSampler(range(9))


@pytest.mark.parametrize(("ranks", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_out_of_range_is_refused(ranks: int, rank: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        DistributedSampler(range(9), ranks, rank)
