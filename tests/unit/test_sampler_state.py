"""Leaving an epoch in the middle and continuing, on any number of ranks: no sample twice or left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DistributedBatchSampler, DistributedSampler
from paceline.errors import ConfigError

worlds = st.lists(st.integers(1, 17), min_size=2, max_size=5)


def one_by_one(length: int, world_size: int, rank: int, **options: object) -> DistributedSampler:
    return DistributedSampler(range(length), world_size, rank, seed=5, **options)


def in_batches(length: int, world_size: int, rank: int, **options: object) -> DistributedBatchSampler:
    options = {"batch_size": 3, **options}
    return DistributedBatchSampler(
        range(length), num_replicas=world_size, rank=rank, shuffle=True, seed=5, **options
    )


def run_epoch(
    make, length: int, world_sizes: list[int], steps: Iterator[int], **options: object
) -> list[int]:
    """Train on a number of ranks, stop after some steps with samples drawn ahead, go on with the next."""
    committed: list[int] = []
    state = None
    for life, world_size in enumerate(world_sizes):
        samplers = [make(length, world_size, rank, **options) for rank in range(world_size)]
        is_last = life == len(world_sizes) - 1
        count = None if is_last else next(steps)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
                sampler.set_epoch(0)  # as training loops do; keeps the position
            items = iter(sampler)
            done = list(islice(items, count))
            list(islice(items, 2))  # fetched ahead, never committed
            for item in done:
                committed += item if isinstance(item, list) else [item]
            sampler.commit(len(done))
        state = json.loads(json.dumps(samplers[0].state_dict()))
    assert state["is_complete"] or length == 0
    return committed


@pytest.mark.parametrize("make", [one_by_one, in_batches])
@given(length=st.integers(0, 3_000) | st.integers(0, 60), world_sizes=worlds, data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_or_seen_twice(make, length: int, world_sizes: list[int], data) -> None:
    steps = iter(data.draw(st.lists(st.integers(0, 60), min_size=5, max_size=5)))
    assert sorted(run_epoch(make, length, world_sizes, steps, pad=False)) == list(range(length))


@given(length=st.integers(0, 2_000), world_sizes=worlds, total=st.integers(17, 40), data=st.data())
@settings(max_examples=40, deadline=None)
def test_constant_global_batches_go_on_too(length: int, world_sizes: list[int], total: int, data) -> None:
    steps = iter(data.draw(st.lists(st.integers(0, 60), min_size=5, max_size=5)))
    options = {"batch_size": None, "global_batch_size": total, "pad": False}
    assert sorted(run_epoch(in_batches, length, world_sizes, steps, **options)) == list(range(length))


@given(length=st.integers(0, 2_000), world_sizes=worlds, data=st.data())
@settings(max_examples=40, deadline=None)
def test_padding_only_repeats_at_the_end(length: int, world_sizes: list[int], data) -> None:
    steps = iter(data.draw(st.lists(st.integers(0, 60), min_size=5, max_size=5)))
    seen = run_epoch(one_by_one, length, world_sizes, steps)
    assert set(seen) == set(range(length))
    # Only a run that came to the end of the epoch pads, and less than one for each of its ranks.
    assert len(seen) < length + max(world_sizes)


def test_a_finished_epoch_leads_to_the_next() -> None:
    sampler = one_by_one(10, 2, 0)
    done = list(sampler)
    sampler.commit(len(done))
    state = sampler.state_dict()
    assert state["is_complete"]
    resumed = one_by_one(10, 2, 0)
    resumed.load_state_dict(state)
    assert len(resumed) == 5
    second = list(resumed)
    assert resumed.epoch == 1 and second == list(sampler)
    again = one_by_one(10, 2, 0)
    again.load_state_dict(state)
    again.set_epoch(0)  # asked to finish epoch 0, of which nothing is left
    assert (len(again), list(again)) == (0, [])
    again.set_epoch(0)  # and now to repeat it
    assert list(again) == done


@pytest.mark.parametrize("make", [one_by_one, in_batches])
def test_iterators_have_states_that_count_what_was_drawn(make) -> None:
    """The parts of a loader that keeps a state for each batch; it may make iterators that it never uses."""
    sampler = make(100, 2, 0)
    whole = list(make(100, 2, 0))
    items = iter(sampler)
    iter(sampler)
    states = [items.state_dict()]
    for _ in whole:
        next(items)
        states.append(json.loads(json.dumps(items.state_dict())))
    for number, state in enumerate(states[:-1]):
        resumed = iter(make(100, 2, 0))
        resumed.load_state_dict(state)
        assert list(resumed) == whole[number:]
    assert states[-1]["is_complete"]
    # The sampler itself counts committed samples.
    assert sampler.state_dict()["position"] == 0
    with pytest.raises(ConfigError, match="under way"):
        resumed.load_state_dict(states[0])


def test_length_counts_what_is_left() -> None:
    sampler = one_by_one(100, 2, 0)
    assert len(sampler) == 50
    list(islice(sampler, 20))
    sampler.commit(10)
    resumed = one_by_one(100, 4, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert len(resumed) == 20
    assert len(list(resumed)) == 20 == len(resumed)
    list(resumed)
    assert len(resumed) == 25


def test_a_state_can_be_taken_before_and_between() -> None:
    sampler = one_by_one(10, 2, 0)
    assert sampler.state_dict()["position"] == 0
    sampler.set_epoch(4)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (4, 0)
    resumed = one_by_one(10, 2, 0)
    resumed.load_state_dict({**sampler.state_dict(), "position": 6})
    assert resumed.state_dict() == {**sampler.state_dict(), "position": 6}
    resumed.set_epoch(5)
    assert resumed.state_dict()["position"] == 0


def test_more_than_was_drawn_can_not_be_committed() -> None:
    sampler = one_by_one(10, 2, 0)
    with pytest.raises(ConfigError, match="more than was drawn"):
        sampler.commit(1)
    items = iter(sampler)
    next(items)
    sampler.commit(1)
    with pytest.raises(ConfigError, match="0 to 1 in all"):
        sampler.commit(1)
    with pytest.raises(ConfigError):
        sampler.commit(-1)


def test_what_does_not_fit_is_refused() -> None:
    state = one_by_one(10, 2, 0).state_dict()
    with pytest.raises(ConfigError, match="length") as caught:
        one_by_one(11, 2, 0).load_state_dict(state)
    assert "length=10" in str(caught.value) and "length=11" in str(caught.value)
    assert (caught.value.saved, caught.value.current) == (10, 11)
    with pytest.raises(ConfigError, match="the seed differs"):
        DistributedSampler(range(10), 2, 0, seed=6).load_state_dict(state)
    with pytest.raises(ConfigError, match="the data set differs"):
        DistributedSampler([0] * 10, 2, 0, seed=5).load_state_dict(state)
    with pytest.raises(ConfigError, match="shuffle differs"):
        DistributedSampler(range(10), 2, 0, seed=5, shuffle=False).load_state_dict(state)
    with pytest.raises(ConfigError, match="another kind of sampler"):
        in_batches(10, 2, 0).load_state_dict(state)
    for broken in ({}, None, {**state, "version": 2}, {**state, "epoch": -1}, {**state, "position": 11}):
        with pytest.raises(ConfigError):
            one_by_one(10, 2, 0).load_state_dict(broken)


def test_data_sets_have_names() -> None:
    options = {"num_replicas": 1, "rank": 0, "dataset_id": "digits"}
    state = DistributedSampler(range(10), **options).state_dict()
    DistributedSampler([0] * 10, **options).load_state_dict(state)
