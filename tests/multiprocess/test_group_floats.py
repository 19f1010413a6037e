"""Results have the same bits on all ranks, whatever the floating-point settings of a rank or a thread."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_array_equal

from tests.harness import kept_ranks
from tests.multiprocess.other_floats import KINDS, delicate, other_floats
from tests.multiprocess.reducer_world import MODEL, World

_COUNTS = (8, 3_000, 100_000)  # small enough that each rank sums all, one piece, many pieces


def sums(count: int, world_size: int) -> np.ndarray:
    """Sums in float64, so that up to three float32s round only once."""
    return np.sum([delicate(rank, count).astype(np.float64) for rank in range(world_size)], axis=0)


@kept_ranks(2)
def test_one_rank_with_other_float_settings_gets_the_same_bits(group):
    in_region = group.allocate(100_000)
    inputs = [delicate(group.rank, count) for count in (*_COUNTS, 100_000)]
    expected = [sums(each.size, 2).astype(np.float32) for each in inputs]
    for floats in KINDS:
        in_region[:] = inputs[-1]
        arrays = [*(each.copy() for each in inputs[:-1]), in_region]
        with other_floats(floats if group.rank == 1 else None):
            for array in arrays:
                group.all_reduce(array)
        for array, total in zip(arrays, expected, strict=True):
            assert_array_equal(array.view(np.uint32), total.view(np.uint32), floats)


@kept_ranks(2)
def test_the_queues_thread_and_the_callers_thread_give_the_same_bits(group):
    mine = delicate(group.rank, 8)
    group.all_reduce(mine.copy(), async_op=True).wait()  # starts the queue's thread, with default settings
    expected = sums(8, 2).astype(np.float32)
    for floats in KINDS:
        queued, synchronous = mine.copy(), mine.copy()
        with other_floats(floats):
            group.all_reduce(queued, async_op=True).wait()
            group.all_reduce(synchronous)
        assert_array_equal(queued.view(np.uint32), expected.view(np.uint32), floats)
        assert_array_equal(synchronous.view(np.uint32), expected.view(np.uint32), floats)


@kept_ranks(3)
def test_means_and_norms_of_the_reducer_have_the_same_bits(group):
    world = World(group)
    seen = {}
    for floats in (None, *KINDS):
        with other_floats(floats if group.rank > 0 else None):
            means = [world.mark(param, 0, elsewhere=param == 2) for param in range(len(MODEL))]
            assert world.reducer.finish(1, False).outcome == 0
            seen[floats] = ([mean.tobytes() for mean in means], world.reducer.squared_norm())
        assert seen[floats] == seen[None], floats
