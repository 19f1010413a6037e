"""BucketedSampler: every sample once, similar lengths in a batch, and as many tokens on every rank."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import BucketedSampler, DistributedBatchSampler
from paceline.data.bucketed import balanced
from paceline.errors import ConfigError

some_lengths = st.lists(st.integers(0, 50), max_size=300)


def batches(lengths: object, total: int, world_size: int, **options: object) -> list[list[list[int]]]:
    samplers = [BucketedSampler(lengths, total, world_size, rank, **options) for rank in range(world_size)]
    drawn = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == list(map(len, drawn))
    return drawn


def steps_of(drawn: list[list[list[int]]]) -> list[list[int]]:
    """The samples of all ranks in each step."""
    steps = max(map(len, drawn))
    return [
        sorted(i for of_rank in drawn for i in (of_rank[s] if s < len(of_rank) else [])) for s in range(steps)
    ]


@given(some_lengths, st.integers(1, 17), st.integers(17, 60), st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sample_once_in_batches_that_ranks_do_not_change(
    lengths: list[int], world_size: int, total: int, pool_batches: int, shuffle: bool
) -> None:
    options = {"pool_batches": pool_batches, "shuffle": shuffle, "pad": False}
    drawn = batches(lengths, total, world_size, **options)
    assert sorted(i for of_rank in drawn for batch in of_rank for i in batch) == list(range(len(lengths)))
    assert all(batch for of_rank in drawn for batch in of_rank)
    assert steps_of(drawn) == steps_of(batches(lengths, total, 1, **options))
    padded = batches(lengths, total, world_size, pool_batches=pool_batches, shuffle=shuffle)
    assert len(set(map(len, padded))) == 1
    assert [len(step) for step in steps_of(padded)] == [total] * -(-len(lengths) // total)
    assert steps_of(padded) == steps_of(
        batches(lengths, total, 1, pool_batches=pool_batches, shuffle=shuffle)
    )
    assert all(set(full) == set(short) for full, short in zip(steps_of(padded), steps_of(drawn), strict=True))
    assert {i for of_rank in padded for batch in of_rank for i in batch} == set(range(len(lengths)))
    dropped = batches(lengths, total, world_size, pool_batches=pool_batches, drop_last=True)
    assert [len(step) for step in steps_of(dropped)] == [total] * (len(lengths) // total)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=100), st.integers(1, 17))
@settings(max_examples=60, deadline=None)
def test_tokens_are_balanced(lengths: list[int], world_size: int) -> None:
    sizes = np.array(lengths)
    shares = balanced(np.arange(len(lengths)), sizes, world_size)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert {len(share) for share in shares} <= {len(lengths) // world_size, -(-len(lengths) // world_size)}
    if len(lengths) % world_size == 0:
        tokens = [int(sizes[share].sum()) for share in shares]
        assert max(tokens) - min(tokens) <= max(lengths)


def test_it_pads_and_waits_less_than_a_plain_shuffle() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 20_480).astype(int) + 1
    used = lengths.sum()

    def costs(drawn: list[list[list[int]]]) -> tuple[float, float]:
        """The wasted work: padding up to a batch's longest; ranks waiting for the busiest."""
        padding = waiting = 0
        for step in zip(*drawn, strict=True):
            padding += sum(lengths[batch].max() * len(batch) for batch in step)
            waiting += max(lengths[batch].sum() for batch in step) * len(step)
        return padding / used - 1, waiting / used - 1

    ours = batches(lengths, 128, 4, pool_batches=50)
    plain = [
        list(DistributedBatchSampler(range(20_480), None, 4, rank, shuffle=True, global_batch_size=128))
        for rank in range(4)
    ]
    (padding, waiting), (plain_padding, plain_waiting) = costs(ours), costs(plain)
    assert padding < plain_padding / 8  # 0.28 against 3.9: some samples are longer than all others
    assert waiting < plain_waiting / 10
    # And batches come in no order of length.
    means = [float(np.mean(lengths[list(batch)])) for batch in ours[0]]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.5


def test_it_resumes_with_other_ranks() -> None:
    lengths = list(range(1000))
    options = {"pad": False, "pool_batches": 4}
    two = [BucketedSampler(lengths, 12, 2, rank, **options) for rank in range(2)]
    done = []
    for sampler in two:
        items = list(islice(sampler, 9))
        sampler.commit(7)
        done += [i for batch in items[:7] for i in batch]
    five = [BucketedSampler(lengths, 12, 5, rank, **options) for rank in range(5)]
    for sampler in five:
        sampler.load_state_dict(two[1].state_dict())
        done += [i for batch in sampler for i in batch]
    assert sorted(done) == lengths
    with pytest.raises(ConfigError, match="global_batch_size differs"):
        BucketedSampler(lengths, 13, 2, 0, **options).load_state_dict(two[0].state_dict())


@pytest.mark.parametrize(
    ("arguments", "options", "what"),
    [
        (([1, 2], 1), {}, "a sample for each rank"),
        (([1, -2], 4), {}, "whole numbers, 0 or more"),
        (([1, 2], 4), {"pool_batches": 0}, "pool_batches=0 is not"),
        (([1, 2], 4), {"drop_last": True, "pad": False}, "contradict"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        BucketedSampler(*arguments, 2, 0, **options)
