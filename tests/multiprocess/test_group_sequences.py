"""Long random sequences of calls, equal on all ranks, with every result checked.

The core reuses buffers two calls or two pieces later without further synchronisation (docs/design/core.md).
These tests would detect a rank that overwrites a buffer which another rank still reads.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.harness import kept_ranks
from tests.multiprocess.group_inputs import PIECE_BYTES, PLACEMENTS, SMALL_BYTES, Places

_COUNTS = [
    1,
    7,
    SMALL_BYTES // 8,
    SMALL_BYTES // 8 + 1,
    PIECE_BYTES // 8,
    PIECE_BYTES // 8 + 3,
    PIECE_BYTES // 4 + 9,
]
_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)


def make_call(group, places, kind, count, placement, root, call):
    """Runs and checks a collective of `kind`, whose values depend on `call`."""
    world, rank = group.world_size, group.rank
    values = np.arange(count, dtype=np.int64) % 251 + call
    context = f"call {call}: {kind} of {count}, {placement}, root {root}"
    if kind == "barrier":
        group.barrier()
    elif kind in ("all_reduce", "reduce"):
        array = places.put(values * (rank + 1), placement)
        if kind == "all_reduce":
            group.all_reduce(array)
        else:
            group.reduce(array, root)
        has_sum = kind == "all_reduce" or rank == root
        assert_array_equal(array, values * (sum(range(world + 1)) if has_sum else rank + 1), context)
    elif kind == "broadcast":
        array = places.put(values * (rank + 1), placement)
        group.broadcast(array, root)
        assert_array_equal(array, values * (root + 1), context)
    elif kind in ("all_gather", "gather"):
        array = places.put(values * (rank + 1), placement)
        out = group.all_gather(array) if kind == "all_gather" else group.gather(array, root)
        if out is not None:
            assert_array_equal(out, np.stack([values * (r + 1) for r in range(world)]), context)
    elif kind == "scatter":
        out = places.put(np.zeros(count, np.int64), placement)
        group.scatter(np.stack([values * (r + 1) for r in range(world)]) if rank == root else None, out, root)
        assert_array_equal(out, values * (rank + 1), context)
    else:
        count = count // world + 1
        blocks = np.stack([values[:count] * (rank + 1) + d for d in range(world)])
        array = places.put(blocks, placement)
        if kind == "reduce_scatter":
            expected = values[:count] * sum(range(world + 1)) + world * rank
            assert_array_equal(group.reduce_scatter(array), expected, context)
        else:
            expected = np.stack([values[:count] * (s + 1) + rank for s in range(world)])
            assert_array_equal(group.all_to_all(array), expected, context)


def run_sequence(group, seed, num_calls, counts=_COUNTS):
    """Runs `num_calls` random calls. Each rank is delayed at random."""
    shared, own = random.Random(seed), random.Random(f"{seed}/{group.rank}")
    places = Places(group, 8 * (PIECE_BYTES // 4 + 100) * group.world_size)
    for call in range(num_calls):
        kind, placement = shared.choice(_KINDS), shared.choice(PLACEMENTS)
        count, root = shared.choice(counts), shared.randrange(group.world_size)
        if own.random() < 0.2:
            np.random.default_rng(call).random(own.randrange(20_000))  # delays this rank
        make_call(group, places, kind, count, placement, root, call)


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (3, 2), (4, 3)])
@kept_ranks("world_size")
def test_random_calls(group, world_size, seed):
    run_sequence(group, seed, 300)


@kept_ranks(3)
def test_many_small_calls(group):
    """Small calls in quick succession, so that copies of payload hide no race between calls."""
    run_sequence(group, 4, 1500, counts=[1, 5, 300])


@kept_ranks(2)
def test_pieces_alternate_from_call_to_call(group):
    """Odd and even numbers of pieces, so that the next call starts with either staging buffer."""
    for call in range(60):
        for pieces in (1, 2, 3):
            count = pieces * PIECE_BYTES // 8 - call
            array = np.full(count, group.rank + call)
            group.all_reduce(array)
            assert array.min() == array.max() == 2 * call + 1
            array = np.full(count, group.rank + call)
            group.broadcast(array, call % 2)
            assert array.min() == array.max() == call % 2 + call
