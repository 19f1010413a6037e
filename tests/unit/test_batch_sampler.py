"""DistributedBatchSampler: batches of all ranks, and the same ones whatever the number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DistributedBatchSampler, DistributedSampler
from paceline.errors import ConfigError
from paceline.reducer.sum_order import cut_tree

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
    """The samples of all ranks in each step, in the order of places."""
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


def expected_steps(order: list[int], total: int, start: int = 0) -> list[list[int]]:
    """The samples of one process that continues with the first samples if the last ones don't fill a step."""
    firsts = range(start, len(order), total)
    return [[order[place % len(order)] for place in range(first, first + total)] for first in firsts]


@given(st.integers(1, 400), worlds, st.integers(17, 60), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_step_has_the_same_samples_on_any_number_of_ranks(
    length: int, world_size: int, total: int, shuffle: bool
) -> None:
    (whole,) = batches(length, 1, batch_size=length, shuffle=shuffle)
    (order,) = whole
    drawn = batches(length, world_size, global_batch_size=total, shuffle=shuffle)
    assert global_batches(drawn) == expected_steps(order, total)
    assert all(batch for of_rank in drawn for batch in of_rank)  # no rank waits for others without data


@given(st.integers(1, 300), st.lists(worlds, min_size=1, max_size=4), st.integers(17, 60), st.data())
@settings(max_examples=40, deadline=None)
def test_it_goes_on_with_other_ranks_through_the_same_steps(
    length: int, lives: list[int], total: int, data: st.DataObject
) -> None:
    """Each run makes some steps and saves; the next one has another number of ranks."""
    options = {"global_batch_size": total, "shuffle": True}
    (alone,) = batches(length, 1, **options)
    state, seen = None, []
    for world_size in lives:
        samplers = [
            DistributedBatchSampler(range(length), None, world_size, rank, **options)
            for rank in range(world_size)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            assert len(sampler) == len(alone) - len(seen)
        runs = [iter(sampler) for sampler in samplers]
        steps = data.draw(st.integers(0, max(0, len(alone) - len(seen) - 1)), label="steps")
        drawn = [[next(run) for _ in range(steps)] for run in runs]
        seen += global_batches(drawn) if steps else []
        for sampler in samplers:
            sampler.commit(steps)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
    rest = batches_from(state, length, 3, options)
    assert seen + global_batches(rest) == alone


def batches_from(state: object, length: int, world_size: int, options: dict) -> list[list[list[int]]]:
    drawn = []
    for rank in range(world_size):
        sampler = DistributedBatchSampler(range(length), None, world_size, rank, **options)
        sampler.load_state_dict(state)
        drawn.append(list(sampler))
        sampler.commit(len(drawn[-1]))
        assert sampler.state_dict()["is_complete"]
    return drawn


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


@given(st.integers(1, 12), st.data(), st.integers(0, 300), st.integers(12, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_virtual_ranks_have_the_same_batches_whatever_plays_them(
    virtual: int, data: st.DataObject, length: int, size: int, drop_last: bool
) -> None:
    """Each of them gets the same as a real rank."""
    options = {"shuffle": True, "global_batch_size": size, "drop_last": drop_last}
    apart = batches(length, virtual, **options)
    fitting = [count for count in range(1, virtual + 1) if cut_tree(virtual, count)]
    world_size = data.draw(st.sampled_from(fitting))
    played: list[list[list[int]]] = []
    for drawn in batches(length, world_size, virtual_ranks=virtual, **options):
        roles = len(drawn) // len(apart[0]) if apart[0] else 0
        played += [drawn[role::roles] for role in range(roles)]
    assert played == (apart if apart[0] else [])


def test_virtual_ranks_need_a_global_batch_and_a_number_of_processes_that_fits() -> None:
    with pytest.raises(ConfigError, match="1, 2, 3, 5"):
        DistributedBatchSampler(range(9), num_replicas=4, rank=0, global_batch_size=8, virtual_ranks=5)
    with pytest.raises(ConfigError, match="virtual"):
        DistributedBatchSampler(range(9), batch_size=2, num_replicas=2, rank=0, virtual_ranks=4)
    with pytest.raises(ConfigError, match="pad"):
        DistributedBatchSampler(
            range(9), num_replicas=2, rank=0, virtual_ranks=4, global_batch_size=8, pad=False
        )
