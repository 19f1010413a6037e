"""Bad input, of every sampler: reported at once, by name, with the expected value; and empty data sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.data import (
    BucketedSampler,
    ChunkedShuffle,
    DistributedBatchSampler,
    DistributedSampler,
    DistributedStream,
    EvaluationSampler,
    SubsetDistributedSampler,
    WeightedDistributedSampler,
)
from paceline.errors import ConfigError

Make = Callable[..., Any]

# Each makes a sampler over `length` samples.
RESUMABLE: dict[str, Make] = {
    "DistributedSampler": lambda length, ranks, rank, **o: DistributedSampler(
        range(length), ranks, rank, **o
    ),
    "DistributedBatchSampler": lambda length, ranks, rank, **o: DistributedBatchSampler(
        range(length), 2, ranks, rank, True, **o
    ),
    "SubsetDistributedSampler": lambda length, ranks, rank, **o: SubsetDistributedSampler(
        range(length), ranks, rank, **o
    ),
    "WeightedDistributedSampler": lambda length, ranks, rank, **o: WeightedDistributedSampler(
        range(1, length + 1), num_replicas=ranks, rank=rank, **o
    ),
    "BucketedSampler": lambda length, ranks, rank, **o: BucketedSampler(range(length), 4, ranks, rank, **o),
    "ChunkedShuffle": lambda length, ranks, rank, **o: ChunkedShuffle(
        range(length), ranks, rank, block_size=3, **o
    ),
}
ALL = {
    **RESUMABLE,
    "DistributedStream": lambda length, ranks, rank, **o: DistributedStream(
        [[i] for i in range(length)], iter, ranks, rank, **o
    ),
    "EvaluationSampler": lambda length, ranks, rank: EvaluationSampler(range(length), ranks, rank),
}
resumable = pytest.mark.parametrize("name", RESUMABLE)
every = pytest.mark.parametrize("name", ALL)


@every
def test_ranks_out_of_range(name: str) -> None:
    for ranks, rank in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(ConfigError, match=f"{name}: (num_replicas|rank)=-?[0-9] is not usable") as caught:
            ALL[name](9, ranks, rank)
        assert caught.value.argument == ("rank" if ranks else "num_replicas")
    with pytest.raises(ConfigError, match=f"{name}: rank=.* is not usable"):
        ALL[name](9, 2, 0.5)


@every
def test_nothing_comes_of_an_empty_data_set(name: str) -> None:
    for rank in range(2):
        assert list(ALL[name](0, 2, rank)) == []


@resumable
def test_an_empty_epoch_can_be_saved_and_loaded(name: str) -> None:
    sampler = RESUMABLE[name](0, 2, 0)
    assert len(sampler) == 0 and list(sampler) == []
    resumed = RESUMABLE[name](0, 3, 0)
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == []


@pytest.mark.parametrize("name", [*RESUMABLE, "DistributedStream"])
def test_epochs_that_are_none(name: str) -> None:
    sampler = ALL[name](9, 2, 0)
    with pytest.raises(ConfigError, match=f"{name}.set_epoch: epoch=-1 is not usable"):
        sampler.set_epoch(-1)
    with pytest.raises(ConfigError, match=f"{name}.set_epoch: epoch=1.0 is not usable"):
        sampler.set_epoch(1.0)
    with pytest.raises(ConfigError, match=f"{name}: seed=None is not usable"):
        ALL[name](9, 2, 0, seed=None)
    sampler.set_epoch(np.int64(3))
    assert sampler.epoch == 3 and isinstance(sampler.epoch, int)


@resumable
def test_states_of_something_else(name: str) -> None:
    state = RESUMABLE[name](9, 2, 0, seed=np.int64(1)).state_dict()
    state = json.loads(json.dumps(state))
    with pytest.raises(ConfigError, match="the data set's length differs") as caught:
        RESUMABLE[name](11, 2, 0, seed=1).load_state_dict(state)
    assert (caught.value.saved, caught.value.current) == (9, 11)
    assert "9" in str(caught.value) and "11" in str(caught.value)
    with pytest.raises(ConfigError, match="the seed differs"):
        RESUMABLE[name](9, 2, 0, seed=2).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"state\['epoch'\]=-1 is not usable"):
        RESUMABLE[name](9, 2, 0, seed=1).load_state_dict({**state, "epoch": -1})
    with pytest.raises(ConfigError, match="saved by another kind of sampler"):
        RESUMABLE[name](9, 2, 0, seed=1).load_state_dict({**state, "sampler": "Other"})
    RESUMABLE[name](9, 2, 0, seed=1).load_state_dict(state)


def test_states_of_other_data() -> None:
    """States of the same length and seed differ by type or name, or by indices, weights and lengths."""
    others: list[tuple[Any, Any]] = [
        (DistributedSampler(range(3), 1, 0), DistributedSampler([1, 2, 3], 1, 0)),
        (DistributedBatchSampler(range(3), 1, 1, 0), DistributedBatchSampler([1, 2, 3], 1, 1, 0)),
        (SubsetDistributedSampler([1, 2], 1, 0), SubsetDistributedSampler([1, 3], 1, 0)),
        (
            WeightedDistributedSampler([1, 2], num_replicas=1, rank=0),
            WeightedDistributedSampler([2, 1], num_replicas=1, rank=0),
        ),
        (BucketedSampler([5, 6], 1, 1, 0), BucketedSampler([6, 5], 1, 1, 0)),
        (
            ChunkedShuffle(range(3), 1, 0, block_size=1, dataset_id="a"),
            ChunkedShuffle(range(3), 1, 0, block_size=1, dataset_id="b"),
        ),
    ]
    for one, other in others:
        with pytest.raises(ConfigError, match="the data set differs"):
            other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: DistributedSampler(iter([1]), 2, 0), "something that has a length"),
        (lambda: DistributedBatchSampler(iter([1]), 2, 2, 0), "something that has a length"),
        (lambda: EvaluationSampler(iter([1]), 2, 0), "something that has a length"),
        (lambda: DistributedBatchSampler(range(9), 2.0, 2, 0), "batch_size=.* is not usable"),
        (lambda: BucketedSampler(range(9), "4", 2, 0), "global_batch_size=.* is not usable"),
        (lambda: BucketedSampler(range(9), 4, 2, 0, pool_batches=1.5), "pool_batches=.* is not usable"),
        (lambda: ChunkedShuffle(range(9), 2, 0, block_size=1e6), "block_size=.* is not usable"),
        (
            lambda: WeightedDistributedSampler([1], 2.5, num_replicas=2, rank=0),
            "num_samples=.* is not usable",
        ),
    ],
)
def test_arguments_of_other_types(make: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make()
