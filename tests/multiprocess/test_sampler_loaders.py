"""Samplers in loaders whose workers prefetch: torch's DataLoader and torchdata's.

Most tests run without the harness: its ranks watch their parent by signals, and torch takes seconds to end
workers there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest

from paceline.data import (
    BucketedSampler,
    ChunkedShuffle,
    DistributedBatchSampler,
    DistributedSampler,
    EvaluationSampler,
    SubsetDistributedSampler,
    WeightedDistributedSampler,
)
from tests.harness import ranks

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed"
)
# Newer Pythons warn about a fork in a process with threads, which torch's loader does.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
LENGTH = 103


@needs_torch
@ranks(2, group="gloo")
def test_the_rank_comes_from_torch_distributed(rank: int) -> None:
    import torch

    sampler = DistributedSampler(range(LENGTH))
    assert (sampler.rank, sampler.num_replicas) == (rank, 2)
    torch.distributed.barrier()  # the other rank may still be forming the group


@needs_torch
@pytest.mark.parametrize("kind", ["batches", "buckets"])
def test_each_step_of_loaders_with_workers_has_the_same_samples_on_any_number_of_ranks(kind: str) -> None:
    from torch.utils.data import DataLoader

    def steps_of(world_size: int) -> list[list[int]]:
        drawn = []
        for rank in range(world_size):
            if kind == "batches":
                sampler: Any = DistributedBatchSampler(
                    range(23), None, world_size, rank, shuffle=True, global_batch_size=5
                )
            else:
                sampler = BucketedSampler([index % 7 for index in range(23)], 5, world_size, rank)
            loader = DataLoader(range(23), batch_sampler=sampler, num_workers=2 * (rank == 0))
            drawn.append([batch.tolist() for batch in loader])
        assert all(batch for of_rank in drawn for batch in of_rank)
        return [sorted(index for part in parts for index in part) for parts in zip(*drawn, strict=True)]

    alone = steps_of(1)
    assert [len(step) for step in alone] == [5] * 5
    for world_size in (2, 3, 5):
        assert steps_of(world_size) == alone


@needs_torch
@pytest.mark.parametrize("rank", [0, 1])
def test_states_do_not_count_what_workers_prefetch(rank: int) -> None:
    from torch.utils.data import DataLoader

    sampler = DistributedSampler(range(LENGTH), 2, rank, seed=2, pad=False)
    loader = DataLoader(range(LENGTH), batch_size=5, sampler=sampler, num_workers=2, persistent_workers=True)
    seen = []
    for batch in islice(loader, 4):
        seen += batch.tolist()
        sampler.commit(len(batch))
    state = sampler.state_dict()
    assert state["position"] == 40
    # The rest, on one rank.
    resumed = DistributedSampler(range(LENGTH), 1, 0, seed=2, pad=False)
    resumed.load_state_dict(state)
    rest = [i for batch in DataLoader(range(LENGTH), 5, sampler=resumed) for i in batch.tolist()]
    whole = list(DistributedSampler(range(LENGTH), 1, 0, seed=2))
    assert whole[:40][rank::2] == seen and whole[40:] == rest
    # Without a call of set_epoch, the loader's next iteration is the next epoch.
    second = [i for batch in loader for i in batch.tolist()]
    chosen = DistributedSampler(range(LENGTH), 2, rank, seed=2, pad=False)
    chosen.set_epoch(1)
    assert second == list(chosen)


@needs_torch
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_through_a_loader(workers: int) -> None:
    from torch.utils.data import DataLoader

    def sampler() -> DistributedBatchSampler:
        return DistributedBatchSampler(range(LENGTH), 5, 2, 1, shuffle=True)

    plain = sampler()
    loader = DataLoader(range(LENGTH), batch_sampler=sampler(), num_workers=workers)
    for _ in range(2):
        assert len(loader) == len(plain)
        assert [batch.tolist() for batch in loader] == list(plain)


@needs_torch
def test_every_kind_of_sampler_goes_through_a_loader() -> None:
    from torch.utils.data import DataLoader

    def samplers() -> list[Iterable[int]]:
        return [
            SubsetDistributedSampler(range(50, LENGTH), 2, 1),
            WeightedDistributedSampler(range(LENGTH), num_replicas=2, rank=1),
            ChunkedShuffle(range(LENGTH), 2, 1, block_size=10, window_blocks=3),
            EvaluationSampler(range(LENGTH), 2, 1),
        ]

    for plain, loaded in zip(samplers(), samplers(), strict=True):
        loader = DataLoader(range(LENGTH), batch_size=5, sampler=loaded, num_workers=1)
        assert [i for batch in loader for i in batch.tolist()] == list(plain)
    bucketed, loaded = [BucketedSampler(range(LENGTH), 8, 2, 1) for _ in range(2)]
    loader = DataLoader(range(LENGTH), batch_sampler=loaded, num_workers=1)
    assert [batch.tolist() for batch in loader] == list(bucketed)


def stateful_loader(kind: str, world_size: int, rank: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    if kind == "samples":
        sampler = DistributedSampler(range(LENGTH), world_size, rank, seed=2, pad=False)
        return StatefulDataLoader(range(LENGTH), 5, sampler=sampler, num_workers=workers)
    batches = DistributedBatchSampler(range(LENGTH), 5, world_size, rank, shuffle=True, pad=False)
    return StatefulDataLoader(range(LENGTH), batch_sampler=batches, num_workers=workers)


@needs_torchdata
@pytest.mark.parametrize("kind", ["samples", "batches"])
@pytest.mark.parametrize("workers", [0, 2])
# torchdata uses what newer versions of torch deprecate.
@pytest.mark.filterwarnings("ignore")
def test_stateful_data_loader_resumes_at_its_position(kind: str, workers: int) -> None:
    """Rank 0's state continues, also with another number of ranks."""
    seen: list[int] = []
    state: dict[str, object] | None = None
    for world_size, batches in ((2, 3), (2, 2), (3, 2), (1, None)):
        states = []
        for rank in range(world_size):
            loader = stateful_loader(kind, world_size, rank, workers)
            if state is not None:
                loader.load_state_dict(state)
            seen += [i for batch in islice(loader, batches) for i in batch.tolist()]
            states.append(loader.state_dict())
        state = states[0]
        if batches is not None:
            assert len(set(seen)) == len(seen) < LENGTH
    assert sorted(seen) == list(range(LENGTH))
