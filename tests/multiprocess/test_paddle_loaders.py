"""Samplers inside Paddle's DataLoader, with and without workers."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import numpy as np
import paddle
import pytest

import paceline.paddle
from paceline.data import DistributedBatchSampler, DistributedSampler, DistributedStream
from tests.multiprocess.paddle_models import ranks

# Newer Pythons warn about a fork in a process with threads, which the loader does.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
LENGTH = 103
SHARDS = [range(10), range(10, 13), range(13, 40)]


class Numbers(paddle.io.Dataset):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.int64:
        return np.int64(index)


class Stream(DistributedStream[range, int], paddle.io.IterableDataset):
    pass


def values(batch: Any) -> list[int]:
    return np.asarray(batch[0] if isinstance(batch, (list, tuple)) else batch).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_epochs_and_states(workers: int) -> None:
    sampler = DistributedBatchSampler(Numbers(), 5, 2, 1, shuffle=True, pad=False)
    plain = DistributedBatchSampler(Numbers(), 5, 2, 1, shuffle=True, pad=False)
    loader = paddle.io.DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    assert len(loader) == len(plain)
    first = list(plain)
    assert [values(batch) for batch in loader] == first
    # Without a call of set_epoch, the next iteration is the next epoch; it can be left and resumed.
    second = list(plain)
    assert second != first
    iterator = iter(loader)
    assert [values(batch) for batch in islice(iterator, 4)] == second[:4]
    if workers:
        iterator._try_shutdown_all()  # otherwise Paddle's workers wait forever, and outlive the tests
    sampler.commit(4)
    resumed = DistributedBatchSampler(Numbers(), 5, 2, 1, shuffle=True, pad=False)
    resumed.load_state_dict(sampler.state_dict())
    loader = paddle.io.DataLoader(Numbers(), batch_sampler=resumed, num_workers=workers)
    assert [values(batch) for batch in loader] == second[4:]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_has_the_attributes_of_paddles_sampler(world_size: int, batch_size: int, drop_last: bool) -> None:
    for rank in range(world_size):
        options = (Numbers(), batch_size, world_size, rank, False, drop_last)
        ours, theirs = DistributedBatchSampler(*options), paddle.io.DistributedBatchSampler(*options)
        for name in ("nranks", "local_rank", "num_samples", "total_size", "batch_size", "drop_last", "epoch"):
            assert getattr(ours, name) == getattr(theirs, name), name


@ranks(1, group=None)
def test_the_replacement_is_accepted_as_paddles_sampler(rank: int) -> None:
    originals = paddle.io.DistributedBatchSampler, paddle.io.BatchSampler
    ours = DistributedBatchSampler(Numbers(), 5, 2, 1, shuffle=True)
    with paceline.paddle.replace_ddp(samplers=True):
        replaced = paddle.io.DistributedBatchSampler
        sampler = replaced(Numbers(), 5, 2, 1, shuffle=True)
        assert all(isinstance(sampler, each) for each in (*originals, DistributedBatchSampler, replaced))
        loader = paddle.io.DataLoader(Numbers(), batch_sampler=sampler)
        assert [values(batch) for batch in loader] == list(ours)
        sampler.commit(3)
        ours.load_state_dict(sampler.state_dict())  # both classes have the same name in their states
        sampler.load_state_dict(ours.state_dict())
        assert list(pickle.loads(pickle.dumps(sampler))) == list(ours)


def test_it_equals_paddles_sampler_without_shuffling() -> None:
    """For batches of one sample; Paddle deals larger batches as a whole, Paceline sample by sample."""
    for rank in range(2):
        ours = list(DistributedBatchSampler(Numbers(), 1, 2, rank))
        theirs = paddle.io.DistributedBatchSampler(Numbers(), 1, num_replicas=2, rank=rank)
        assert ours == list(theirs)


def test_single_samples_through_paddles_batch_sampler() -> None:
    sampler = DistributedSampler(Numbers(), 2, 0)
    batches = paddle.io.BatchSampler(sampler=sampler, batch_size=4)
    assert [i for batch in batches for i in batch] == list(DistributedSampler(Numbers(), 2, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_share_a_stream(workers: int) -> None:
    seen = []
    for rank in range(2):
        loader = paddle.io.DataLoader(Stream(SHARDS, iter, 2, rank), batch_size=4, num_workers=workers)
        seen += [i for batch in loader for i in values(batch)]
    assert sorted(seen) == list(range(40))
