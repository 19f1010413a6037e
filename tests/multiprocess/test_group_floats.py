"""The same bits on all ranks, whatever a rank, or a thread of one, has told its processor about floats."""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.harness import ranks
from tests.multiprocess.reducer_world import MODEL, World

# The numbers of this processor's <fenv.h>.
_ROUNDING = {
    "x86_64": {"downward": 0x400, "upward": 0x800, "towards zero": 0xC00},
    "aarch64": {"downward": 0x800000, "upward": 0x400000, "towards zero": 0xC00000},
}.get(platform.machine(), {})
_COUNTS = (8, 3_000, 100_000)  # each rank for itself, one piece, many pieces
KINDS = [*_ROUNDING, "flushed"]


def enter(floats: str) -> None:
    """Change this thread's floats; what is expected must be known before."""
    if floats in _ROUNDING:
        assert ctypes.CDLL("libm.so.6").fesetround(_ROUNDING[floats]) == 0
        return
    import torch

    if not torch.set_flush_denormal(True):
        pytest.fail("this processor does not flush subnormals")


def delicate(rank: int, count: int) -> np.ndarray:
    """Subnormal elements, and others, whose sums over ranks must be rounded."""
    values = np.random.default_rng(rank).normal(size=count).astype(np.float32)
    values[::2] = values[::2] * np.float32(1e-39)
    return values


def sums(count: int, world_size: int) -> np.ndarray:
    """In float64, where sums of up to three float32s round once."""
    return np.sum([delicate(rank, count).astype(np.float64) for rank in range(world_size)], axis=0)


@pytest.mark.parametrize("floats", KINDS)
@ranks(2)
def test_one_rank_with_other_floats_gets_the_same_bits(group, floats):
    arrays = [delicate(group.rank, count) for count in _COUNTS]
    in_region = group.allocate(100_000)
    in_region[:] = delicate(group.rank, 100_000)
    expected = [sums(count, 2).astype(np.float32) for count in (*_COUNTS, 100_000)]
    if group.rank == 1:
        enter(floats)
    for array in (*arrays, in_region):
        group.all_reduce(array)
    for array, total in zip((*arrays, in_region), expected):
        assert_array_equal(array.view(np.uint32), total.view(np.uint32))


@pytest.mark.parametrize("floats", KINDS)
@ranks(2)
def test_the_queues_thread_and_the_callers_give_the_same_bits(group, floats):
    mine = delicate(group.rank, 8)
    group.all_reduce(mine.copy(), async_op=True).wait()  # starts the thread, with the processor's defaults
    queued, made_here = mine.copy(), mine.copy()
    expected = sums(8, 2).astype(np.float32)
    enter(floats)
    group.all_reduce(queued, async_op=True).wait()
    group.all_reduce(made_here)
    assert_array_equal(queued.view(np.uint32), expected.view(np.uint32))
    assert_array_equal(made_here.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("floats", KINDS)
@ranks(3)
def test_means_and_norms_of_the_reducer_have_the_same_bits(group, floats):
    world = World(group)
    seen = []
    for is_changed in (False, True):
        if is_changed and group.rank > 0:
            enter(floats)
        means = [world.mark(param, 0, elsewhere=param == 2) for param in range(len(MODEL))]
        assert world.reducer.finish(1, False) == 0
        seen.append(([mean.tobytes() for mean in means], world.reducer.squared_norm()))
    assert seen[0] == seen[1]
