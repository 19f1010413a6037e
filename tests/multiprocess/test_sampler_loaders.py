"""Samplers inside loaders with workers, which fetch ahead: torch's DataLoader and torchdata's.

Without the harness: in its ranks, which watch their parent by signals, torch takes seconds to end workers.
"""

from __future__ import annotations

import importlib.util
import warnings
from itertools import islice

import pytest

from paceline.data import DistributedBatchSampler, DistributedSampler
from tests.harness import ranks

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed"
)
# Newer Pythons warn of forks beside threads, which is what torch's loader does.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
LENGTH = 103


@needs_torch
@ranks(2, group="gloo")
def test_torch_distributed_says_the_rank(rank: int) -> None:
    sampler = DistributedSampler(range(LENGTH))
    assert (sampler.rank, sampler.num_replicas) == (rank, 2)


@needs_torch
@pytest.mark.parametrize("rank", [0, 1])
def test_workers_fetch_ahead_and_states_do_not_count_it(rank: int) -> None:
    from torch.utils.data import DataLoader

    sampler = DistributedSampler(range(LENGTH), 2, rank, seed=2, pad=False)
    loader = DataLoader(range(LENGTH), batch_size=5, sampler=sampler, num_workers=2, persistent_workers=True)
    seen = []
    for batch in islice(loader, 4):
        seen += batch.tolist()
        sampler.commit(len(batch))
    state = sampler.state_dict()
    assert state["position"] == 40
    # The rest, on one rank alone.
    resumed = DistributedSampler(range(LENGTH), 1, 0, seed=2, pad=False)
    resumed.load_state_dict(state)
    rest = [i for batch in DataLoader(range(LENGTH), 5, sampler=resumed) for i in batch.tolist()]
    whole = list(DistributedSampler(range(LENGTH), 1, 0, seed=2))
    assert whole[:40][rank::2] == seen and whole[40:] == rest
    # The next iteration of the loader is the next epoch, which nobody has set.
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


@needs_torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader_keeps_its_place(workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    lives: list[list[list[int]]] = []
    states: list[dict[str, object]] = []
    for batches in (3, 4, None):
        for rank in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it uses what newer versions of torch deprecate
                sampler = DistributedSampler(range(LENGTH), 2, rank, seed=2, pad=False)
                loader = StatefulDataLoader(range(LENGTH), 5, sampler=sampler, num_workers=workers)
                if len(states) == 2:
                    loader.load_state_dict(states.pop(0))
                lives.append([batch.tolist() for batch in islice(loader, batches)])
                states.append(loader.state_dict())
    assert [len(seen) for seen in lives] == [3, 3, 4, 4, 4, 4]
    assert sorted(i for seen in lives for batch in seen for i in batch) == list(range(LENGTH))
