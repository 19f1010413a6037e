"""DistributedBatchSampler: batches of all ranks, and the same ones whatever the number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DistributedBatchSampler, DistributedSampler
from paceline.errors import ConfigError

lengths = st.integers(0, 5_000) | st.integers(0, 60)
worlds = st.integers(1, 17)


def batches(length: int, world_size: int, **options: object) -> list[list[list[int]]]:
    samplers = [
        DistributedBatchSampler(range(length), num_replicas=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]
    for sampler in samplers:
        sampler.set_epoch(0)
    return [list(sampler) for sampler in samplers]


def flat(drawn: list[list[list[int]]]) -> list[int]:
    return [index for of_rank in drawn for batch in of_rank for index in batch]


def global_batches(drawn: list[list[list[int]]]) -> list[list[int]]:
    """What all ranks together do in each step, in the order of places."""
    steps = []
    for step in range(max(map(len, drawn))):
        parts = [of_rank[step] for of_rank in drawn if step < len(of_rank)]
        longest = max(map(len, parts))
        steps.append([part[i] for i in range(longest) for part in parts if i < len(part)])
    return steps


@given(lengths, worlds, st.integers(1, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_once(length: int, world_size: int, batch_size: int, shuffle: bool) -> None:
    drawn = batches(length, world_size, batch_size=batch_size, shuffle=shuffle, pad=False)
    assert sorted(flat(drawn)) == list(range(length))
    assert all(0 < len(batch) <= batch_size for of_rank in drawn for batch in of_rank)


@given(lengths, worlds, st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_padded_and_dropped_steps_are_equally_many(length: int, world_size: int, batch_size: int) -> None:
    padded = batches(length, world_size, batch_size=batch_size)
    assert len({tuple(map(len, of_rank)) for of_rank in padded}) == 1
    assert set(flat(padded)) == set(range(length))
    assert len(flat(padded)) == -(-length // world_size) * world_size
    dropped = batches(length, world_size, batch_size=batch_size, drop_last=True)
    assert all(len(batch) == batch_size for of_rank in dropped for batch in of_rank)
    step = batch_size * world_size
    assert sorted(flat(dropped)) == list(range(length // step * step))


@given(st.integers(1, 2_000), worlds, st.integers(17, 60))
@settings(max_examples=40, deadline=None)
def test_global_batches_do_not_depend_on_the_ranks(length: int, world_size: int, total: int) -> None:
    options = {"global_batch_size": total, "shuffle": True, "pad": False}
    (alone,) = batches(length, 1, **options)
    assert global_batches(batches(length, world_size, **options)) == alone


@given(lengths, worlds, st.integers(17, 60), st.booleans())
@settings(max_examples=40, deadline=None)
def test_it_knows_how_many_samples_there_are(length: int, world_size: int, total: int, pad: bool) -> None:
    options = {"global_batch_size": total, "pad": pad}
    drawn = batches(length, world_size, **options)
    for rank in range(world_size):
        sampler = DistributedBatchSampler(range(length), num_replicas=world_size, rank=rank, **options)
        assert sampler.num_samples == len(flat([drawn[rank]]))
        assert sampler.total_size == len(flat(drawn))
        assert (sampler.nranks, sampler.local_rank) == (world_size, rank)


@given(st.integers(0, 500), st.integers(1, 6), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_it_is_a_batched_distributed_sampler(length: int, world_size: int, batch_size: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    drawn = batches(length, world_size, batch_size=batch_size, shuffle=True, seed=9)
    for rank in range(world_size):
        one_by_one = DistributedSampler(range(length), world_size, rank, seed=9)
        assert drawn[rank] == list(data.BatchSampler(one_by_one, batch_size, drop_last=False))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "one of batch_size"),
        ({"batch_size": 2, "global_batch_size": 4}, "one of batch_size"),
        ({"batch_size": 0}, "batch_size=0 is not"),
        ({"global_batch_size": 1}, "a sample for each rank"),
        ({"batch_size": 1, "drop_last": True, "pad": False}, "contradict"),
    ],
)
def test_bad_sizes_are_refused(options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        DistributedBatchSampler(range(9), num_replicas=2, rank=0, **options)
