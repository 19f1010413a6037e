"""DistributedStream: shards over ranks and workers, none twice; and the definition of a worker."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import DistributedStream
from paceline.data.stream import deal_shards
from paceline.errors import ConfigError

SHARDS = [range(10), range(10, 13), range(13, 13), range(13, 40), range(40, 47)]


@given(st.integers(0, 40), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_consumers_share_all_shards(num_shards: int, num_consumers: int) -> None:
    parts: Counter[tuple[int, int, int]] = Counter()
    for consumer in range(num_consumers):
        parts.update(deal_shards(num_shards, consumer, num_consumers))
    assert set(parts.values()) <= {1}
    for shard in range(num_shards):
        of_shard = sorted((part, of) for place, part, of in parts if place == shard)
        assert of_shard == [(part, len(of_shard)) for part in range(len(of_shard))]
    assert {place for place, _, _ in parts} == set(range(num_shards))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_see_every_element_once(world_size: int, shuffle: bool) -> None:
    streams = [DistributedStream(SHARDS, iter, world_size, rank, shuffle) for rank in range(world_size)]
    for epoch in range(3):
        seen = []
        for stream in streams:
            stream.set_epoch(epoch)
            seen += list(stream)
        assert sorted(seen) == list(range(47))


def test_epochs_permute_the_shards() -> None:
    stream = DistributedStream([[i] for i in range(100)], iter, 1, 0)
    first = list(stream)
    assert list(stream) == first
    stream.set_epoch(1)
    assert list(stream) != first
    with pytest.raises(ConfigError, match="epoch=-1 is not usable"):
        stream.set_epoch(-1)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_share_too(workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    seen = []
    for rank in range(2):
        stream = DistributedStream(SHARDS, iter, 2, rank)
        loader = data.DataLoader(stream, batch_size=4, num_workers=workers)
        seen += [i for batch in loader for i in batch.tolist()]
    assert sorted(seen) == list(range(47))
