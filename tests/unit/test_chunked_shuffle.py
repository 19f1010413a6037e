"""ChunkedShuffle: every sample once, few blocks at a time, and well mixed inside a window."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import ChunkedShuffle
from paceline.errors import ConfigError

sizes = st.tuples(st.integers(0, 3_000), st.integers(1, 200), st.integers(1, 10))


@given(sizes, st.integers(1, 17))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_and_few_blocks_at_a_time(size: tuple[int, int, int], world_size: int) -> None:
    length, block_size, window_blocks = size
    samplers = [
        ChunkedShuffle(
            range(length), world_size, rank, block_size=block_size, window_blocks=window_blocks, pad=False
        )
        for rank in range(world_size)
    ]
    parts = [list(sampler) for sampler in samplers]
    order = np.array([parts[i % world_size][i // world_size] for i in range(length)], np.int64)
    assert sorted(order) == list(range(length))
    (alone,) = [list(ChunkedShuffle(range(length), 1, 0, block_size=block_size, window_blocks=window_blocks))]
    assert order.tolist() == alone
    # Windows hold whole blocks: as many as they may, and none that another one holds.
    position, num_blocks = 0, -(-length // block_size)
    seen: set[int] = set()
    for first in range(0, num_blocks, window_blocks):
        blocks: set[int] = set()
        expected = min(window_blocks, num_blocks - first)
        while position < length and (len(blocks) < expected or order[position] // block_size in blocks):
            blocks.add(int(order[position]) // block_size)
            position += 1
        assert len(blocks) == expected and not blocks & seen
        seen |= blocks
    assert position == length


def test_windows_and_blocks_are_mixed() -> None:
    sampler = ChunkedShuffle(range(100_000), 1, 0, block_size=100, window_blocks=100)
    first, second = np.array(list(sampler)), np.array(list(sampler))
    for order in (first, second):
        for window in order.reshape(10, 10_000):
            ranks = np.argsort(np.argsort(window))
            assert abs(np.corrcoef(ranks, np.arange(10_000))[0, 1]) < 0.05
            assert abs(np.corrcoef(window[:-1], window[1:])[0, 1]) < 0.05
    assert set(first[:10_000]) != set(second[:10_000])
    assert sampler.window_samples == 10_000


def test_it_stores_nothing_and_resumes() -> None:
    options = {"block_size": 1000, "window_blocks": 16, "pad": False}
    sampler = ChunkedShuffle(range(10**12), 8, 0, **options)
    assert len(set(islice(sampler, 20_000))) == 20_000
    sampler.commit(10_000)
    resumed = ChunkedShuffle(range(10**12), 1, 0, **options)
    resumed.load_state_dict(sampler.state_dict())
    alone = ChunkedShuffle(range(10**12), 1, 0, **options)
    assert list(islice(resumed, 100)) == list(islice(alone, 80_000, 80_100))
    with pytest.raises(ConfigError, match="block_size differs"):
        ChunkedShuffle(range(10**12), 1, 0, block_size=10).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("sizes", [{"block_size": 0}, {"block_size": 1, "window_blocks": 0}])
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="=0 is not usable"):
        ChunkedShuffle(range(9), 1, 0, **sizes)
