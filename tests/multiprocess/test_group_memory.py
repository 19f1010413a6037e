"""Arrays in the region: shapes, zeros, freeing in any order, and failed allocations."""

from __future__ import annotations

import contextlib
import gc
import os
import random

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline.errors import ConfigError, RegionError
from tests.harness import kept_ranks, ranks


@kept_ranks(2)
def test_shapes_and_types(group):
    for shape, dtype in (
        ((), "float64"),
        ((0,), "int8"),
        ((3, 0, 2), "float32"),
        ((5, 7), "bool"),
        (9, "int16"),
    ):
        array = group.allocate(shape, dtype)
        assert array.shape == ((shape,) if isinstance(shape, int) else shape)
        assert array.dtype == np.dtype(dtype)
        assert array.flags.c_contiguous and array.flags.writeable and array.ctypes.data % 64 == 0
        assert not array.any()
    pair = group.allocate(3, np.dtype([("a", "i4"), ("b", "f8")]))
    pair["b"] = 2
    assert pair.tolist() == [(0, 2.0)] * 3
    with pytest.raises(ConfigError, match="shape="):
        group.allocate((3, -1))
    with pytest.raises(ConfigError, match="without Python"):
        group.allocate(3, object)


@kept_ranks(3)
def test_freed_in_another_order_on_each_rank(group):
    shared, own = random.Random(1), random.Random(group.rank)
    held = []
    for step in range(80):
        if shared.random() < 0.6 or len(held) < 4:
            count = shared.randrange(1, 60_000)
            array = group.allocate(count, np.int64)
            assert not array.any()  # also in memory that another array has used
            array[:] = group.rank + step
            held.append((array, step))
        else:
            freed = shared.sample(range(len(held)), 3)
            for index in sorted(freed, key=lambda _: own.random()):
                held[index][0][:] = -1
                held[index] = (None, -1)
            held = [each for each in held if each[0] is not None]
        array, value = held[shared.randrange(len(held))]
        total = array[:100].copy()
        group.all_reduce(total)
        assert_array_equal(total, 3 * value + 3)
        if own.random() < 0.1:
            gc.collect()
    for array, value in held:
        assert_array_equal(array, group.rank + value)


@kept_ranks(2)
def test_a_view_keeps_the_memory(group):
    view = group.allocate(1000)[10:20]
    view[:] = group.rank + 1
    for _ in range(5):
        group.allocate(1000)[:] = 99
    group.all_reduce(view)
    assert_array_equal(view, 3)


@ranks(2)
def test_allocations_larger_than_the_memory(group):
    with open("/proc/meminfo", encoding="ascii") as file:
        total_bytes = int(file.readline().split()[1]) * 1024
    for shape in ((1 << 30, 1 << 30), (1 << 40, 1 << 40), 1 << 62, total_bytes, total_bytes // 2 - (1 << 26)):
        with pytest.raises(RegionError, match=r"bytes"):
            group.allocate(shape, np.uint8)
    array = group.allocate(1 << 20)  # the group is still usable
    array[:] = 1
    group.all_reduce(array)
    assert_array_equal(array, 2)


def region_descriptors():
    """Returns this process's descriptors of regions, which a program that becomes a daemon closes."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:paceline"):
                found.append(number)
    assert found
    return found


@ranks(3)
def test_a_rank_that_cannot_reserve_is_named_by_all(group):
    before = group.allocate(1000)
    kept = []
    if group.rank == 2:
        kept = [(number, os.dup(number)) for number in region_descriptors()]
        for number, _ in kept:
            os.close(number)
    for _ in range(2):
        with pytest.raises(RegionError, match="Rank 2 of 3 could not reserve shared memory") as caught:
            group.allocate(1000)
        assert caught.value.ranks == (2,)
        assert caught.value.seen.startswith("rank 2 could not reserve 4096 bytes: ")
        assert caught.value.seen.endswith("Bad file descriptor")
        assert ("os.closerange" in str(caught.value)) is (group.rank == 2)
        assert ("what rank 2 raised" in caught.value.hint) is (group.rank != 2)
        before[:] = group.rank  # existing arrays stay usable
        group.all_reduce(before)
        assert_array_equal(before, 3)
    for number, copy in kept:
        os.dup2(copy, number)
    array = group.allocate(1000)  # works again after the failure
    assert not array.any()


@ranks(2)
def test_a_file_with_the_number_of_a_closed_descriptor_is_not_touched(group, tmp_path):
    """The core neither reserves nor frees space in that file, nor closes it, also not in a forked child."""
    arrays = [group.allocate(100_000) for _ in range(3)]
    with open(tmp_path / f"users-{group.rank}", "w+b") as file:
        file.write(b"x" * 10_000)
        file.flush()
        numbers = region_descriptors()
        for number in numbers:
            os.dup2(file.fileno(), number)
        del arrays[1:]  # frees memory of the region
        with pytest.raises(RegionError, match="Ranks 0-1 of 2 could not reserve"):
            group.allocate(100_000)
        child = os.fork()
        if child == 0:
            os._exit(any(os.fstat(number).st_size != 10_000 for number in numbers))
        assert os.waitpid(child, 0)[1] == 0
        arrays.clear()
        group.close()
        del group
        gc.collect()
        for number in numbers:
            assert os.fstat(number).st_ino == os.fstat(file.fileno()).st_ino
            assert os.fstat(number).st_size == 10_000
        file.seek(0)
        assert file.read() == b"x" * 10_000


@ranks(1)
def test_too_many_arrays(group):
    arrays = [group.allocate(1) for _ in range(4096)]
    with pytest.raises(RegionError, match="4096 arrays are alive") as caught:
        group.allocate(1)
    assert "views" in caught.value.hint
    del arrays[100:]
    assert len({each.ctypes.data for each in [*arrays, group.allocate(1)]}) == 101


@ranks(2)
def test_memory_outlives_a_closed_group(group):
    inner = group.subgroup([0, 1])
    array = inner.allocate(1000)
    inner.close()
    del inner
    array[:] = 5
    assert array.sum() == 5000
    del array
    group.barrier()
