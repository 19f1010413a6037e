"""Every collective against numpy: all types, sizes around the core's limits, arrays in the region or not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.harness import kept_ranks
from tests.multiprocess.group_inputs import (
    DTYPES,
    PIECE_BYTES,
    PLACEMENTS,
    Places,
    edge_counts,
    ops_of,
    reduced,
    values_of,
)

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def inputs_of(group, count, dtype):
    return [values_of(rank, count, dtype) for rank in range(group.world_size)]


@WORLD_SIZES
@kept_ranks("world_size")
def test_all_reduce(group, world_size):
    places = Places(group, 4 * PIECE_BYTES)
    for dtype in DTYPES:
        for count in edge_counts(dtype):
            inputs = inputs_of(group, count, dtype)
            for i, placement in enumerate(PLACEMENTS):
                ops = ops_of(dtype)
                for op in ops if count < 10 else (ops[(i + count) % len(ops)], "sum"):
                    array = places.put(inputs[group.rank], placement)
                    assert group.all_reduce(array, op) is None
                    assert_array_equal(array, reduced(inputs, op), f"{dtype} {count} {placement} {op}")


@WORLD_SIZES
@kept_ranks("world_size")
def test_reduce_and_reduce_scatter(group, world_size):
    places = Places(group, 4 * world_size * PIECE_BYTES)
    for dtype in DTYPES:
        for count in edge_counts(dtype):
            inputs = inputs_of(group, count, dtype)
            op, root = ops_of(dtype)[count % 4], count % world_size
            for placement in PLACEMENTS:
                array = places.put(inputs[group.rank], placement)
                group.reduce(array, root, op)
                expected = reduced(inputs, op) if group.rank == root else inputs[group.rank]
                assert_array_equal(array, expected, f"reduce {dtype} {count} {placement} {op}")
        for count in edge_counts(dtype, world_size):
            inputs = [each.reshape(world_size, count) for each in inputs_of(group, world_size * count, dtype)]
            op = ops_of(dtype)[count % 4]
            expected = reduced(inputs, op)[group.rank]
            for placement in PLACEMENTS:
                array = places.put(inputs[group.rank], placement)
                out = group.reduce_scatter(array, op=op)
                assert_array_equal(out, expected, f"reduce_scatter {dtype} {count} {placement} {op}")
                assert_array_equal(array, inputs[group.rank])
                assert group.reduce_scatter(array, array[group.rank], op).base is not None  # in place
                assert_array_equal(array[group.rank], expected)


@WORLD_SIZES
@kept_ranks("world_size")
def test_broadcast_gather_and_scatter(group, world_size):
    places = Places(group, 4 * world_size * PIECE_BYTES)
    for dtype in ("int16", "float64"):
        for count in edge_counts(dtype):
            inputs = inputs_of(group, count, dtype)
            own, stacked, root = inputs[group.rank], np.stack(inputs), count % world_size
            for placement in PLACEMENTS:
                context = f"{dtype} {count} {placement}"
                array = places.put(own, placement)
                group.broadcast(array, root)
                assert_array_equal(array, inputs[root], f"broadcast {context}")

                array = places.put(own, placement)
                assert_array_equal(group.all_gather(array), stacked, f"all_gather {context}")
                gathered = group.gather(array, root)
                if group.rank == root:
                    assert_array_equal(gathered, stacked, f"gather {context}")
                else:
                    assert gathered is None
                assert_array_equal(array, own)

                out = places.put(np.zeros(count, dtype), placement)
                group.scatter(stacked if group.rank == root else None, out, root)
                assert_array_equal(out, own, f"scatter {context}")


@WORLD_SIZES
@kept_ranks("world_size")
def test_all_to_all_and_all_gather_in_place(group, world_size):
    places = Places(group, 4 * world_size * PIECE_BYTES)
    for dtype in ("int16", "float64"):
        for count in edge_counts(dtype, world_size):
            # Block d of rank s holds s * world_size + d.
            blocks = [
                [np.full(count, s * world_size + d, dtype) for d in range(world_size)]
                for s in range(world_size)
            ]
            for placement in PLACEMENTS:
                array = places.put(np.stack(blocks[group.rank]), placement)
                expected = np.stack([blocks[source][group.rank] for source in range(world_size)])
                assert_array_equal(
                    group.all_to_all(array), expected, f"all_to_all {dtype} {count} {placement}"
                )

                inputs = inputs_of(group, count, dtype)
                array = places.put(np.zeros((world_size, count), dtype), placement)
                array[group.rank] = inputs[group.rank]
                assert group.all_gather(array[group.rank], array) is array
                assert_array_equal(
                    array, np.stack(inputs), f"all_gather in place {dtype} {count} {placement}"
                )


@pytest.mark.parametrize("world_size", [9, 16])
@kept_ranks("world_size")
def test_more_ranks_than_cores_do_not_collapse(group, world_size):
    rank = group.rank
    places = Places(group, 4 * PIECE_BYTES)
    total = world_size * (world_size - 1) // 2
    for count in (1, 5000, PIECE_BYTES // 8 + 77):
        for placement in PLACEMENTS:
            array = places.put(np.full(count, rank, np.int64), placement)
            group.all_reduce(array)
            assert_array_equal(array, np.full(count, total))
    for _ in range(100):  # if waits only spun, each barrier would take a scheduler's time slice per rank
        group.barrier()
    assert_array_equal(group.all_gather(np.array([rank]))[:, 0], np.arange(world_size))
    exchanged = group.all_to_all(np.arange(world_size) + 100 * rank)
    assert_array_equal(exchanged, 100 * np.arange(world_size) + rank)
    scattered = group.reduce_scatter(np.arange(world_size * 3.0).reshape(world_size, 3))
    assert_array_equal(scattered, world_size * np.arange(3.0 * rank, 3 * rank + 3))


@kept_ranks(3)
def test_bfloat16_by_its_bits(group):
    """numpy has no bfloat16, so the test passes a pointer to the core, like the front ends."""
    for count in (1, 100_000, 300_001):
        values = np.full(count, group.rank + 1, np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        group._core.all_reduce(bits.ctypes.data, count, 3, 1)  # bfloat16, mean
        assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), np.full(count, 2.0, np.float32))


@kept_ranks(3)
def test_weighted_mean(group):
    """sum(w_r * x_r) / sum(w_r). A rank of weight 0 does not affect the mean, even with NaN."""
    places = Places(group, 4 * PIECE_BYTES)
    weights = (1.0, 2.5, 0.5)
    for dtype in ("float32", "float64", "float16"):
        for count in edge_counts(dtype)[1:]:
            inputs = inputs_of(group, count, dtype)
            expected = sum(w * x.astype(np.float64) for w, x in zip(weights, inputs)) / sum(weights)
            for placement in PLACEMENTS:
                array = places.put(inputs[group.rank], placement)
                group.all_reduce(array, "mean", weight=weights[group.rank])
                assert_array_equal(array, expected.astype(dtype), f"{dtype} {count} {placement}")

                array = places.put(inputs[group.rank], placement)
                if group.rank == 1:
                    array[...] = np.nan
                group.all_reduce(array, "mean", weight=0.0 if group.rank == 1 else 3.0)
                expected_without = (inputs[0].astype(np.float64) + inputs[2]) / 2
                assert_array_equal(array, expected_without.astype(dtype), f"without rank 1: {dtype} {count}")


@kept_ranks(2)
def test_shapes_survive(group):
    array = np.full((3, 4, 5), group.rank + 1.0)
    group.all_reduce(array)
    assert_array_equal(array, np.full((3, 4, 5), 3.0))
    assert group.all_gather(array).shape == (2, 3, 4, 5)
    assert group.all_gather(np.array(7.0)).shape == (2,)
    assert group.reduce_scatter(np.ones((2, 3, 4))).shape == (3, 4)
    assert group.all_to_all(np.ones((2, 0, 4))).shape == (2, 0, 4)
    out = np.empty((2, 3))
    assert group.all_gather(np.full(3, group.rank, float), out) is out
    assert_array_equal(out, [[0, 0, 0], [1, 1, 1]])
