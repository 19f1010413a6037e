"""The expected results of reductions over ranks, bit for bit, and arrays to try them with.

Shares no code with the kernels: numpy's own arithmetic and float16; bfloat16 by integer operations.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class DType(IntEnum):
    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT8 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8
    BOOL = 9


class Op(IntEnum):
    SUM = 0
    MEAN = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4


FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
STORED = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(np.uint16),  # numpy has no bfloat16: its bits
    DType.INT8: np.dtype(np.int8),
    DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.UINT8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.uint8),  # any byte may come; any other than 0 is true
}


def bfloat16_to_float32(bits: Array) -> Array:
    return (bits.astype(np.uint32) * np.uint32(65536)).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """To the nearest, ties to the even one; decided by comparing the cut-off half with a half unit."""
    bits = values.view(np.uint32)
    kept, cut = bits // 65536, bits % 65536
    rounds_up = (cut > 32768) | ((cut == 32768) & (kept % 2 == 1))
    return np.where(np.isnan(values), 0x7FC0, kept + rounds_up).astype(np.uint16)


def to_compute(dtype: DType, stored: Array) -> Array:
    if dtype == DType.BFLOAT16:
        return bfloat16_to_float32(stored)
    if dtype == DType.FLOAT16:
        return stored.astype(np.float32)
    if dtype == DType.BOOL:
        return stored.astype(np.bool_)
    return stored


def to_stored(dtype: DType, values: Array) -> Array:
    if dtype == DType.BFLOAT16:
        return float32_to_bfloat16(values)
    return values.astype(STORED[dtype])


def combine(op: Op, a: Array, b: Array) -> Array:
    if op == Op.MIN:
        return np.minimum(a, b)
    if op == Op.MAX:
        return np.maximum(a, b)
    return a * b if op == Op.PRODUCT else a + b


def tree(op: Op, values: list[Array]) -> Array:
    """((0+1)+(2+3))+...: neighbours level by level, an odd one carried up."""
    while len(values) > 1:
        pairs = zip(values[0::2], values[1::2])
        values = [combine(op, a, b) for a, b in pairs] + values[len(values) // 2 * 2 :]
    return values[0]


def expected_result(dtype: DType, op: Op, arrays: list[Array], weights: list[float] | None = None) -> Array:
    values = [to_compute(dtype, array) for array in arrays]
    if op != Op.MEAN:
        return to_stored(dtype, tree(op, values))
    compute = values[0].dtype.type
    if weights is None:
        return to_stored(dtype, tree(op, values) / compute(len(arrays)))
    total = compute(tree(Op.SUM, [np.float64(w) for w in weights]))
    parts = [np.zeros_like(v) if w == 0 else v * compute(w) for v, w in zip(values, weights)]
    mean = tree(op, parts) / total
    return to_stored(dtype, np.zeros_like(mean) if not any(weights) else mean)


def expected_norm(dtype: DType, result: Array) -> float:
    """Element i is added to lane i % 16; then the upper half of the lanes to the lower, until one is left."""
    values = to_compute(dtype, result).astype(np.float64)
    padded = np.zeros((len(values) + 16) // 16 * 16)
    padded[: len(values)] = values * values
    lanes = np.cumsum(padded.reshape(-1, 16), axis=0)[-1]  # cumsum adds in order, sum does not
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return float(lanes[0])


def nonfinite_ranks(dtype: DType, arrays: list[Array]) -> set[int]:
    return {rank for rank, a in enumerate(arrays) if not np.isfinite(to_compute(dtype, a)).all()}


def random_array(dtype: DType, count: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        # Spread over magnitudes, so that another order of addition gives other bits.
        values = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)
        return to_stored(dtype, values.astype(np.float64 if dtype == DType.FLOAT64 else np.float32))
    if dtype == DType.BOOL:
        return rng.choice(np.array([0, 1, 2, 255], np.uint8), count)
    info = np.iinfo(STORED[dtype])
    return rng.integers(info.min, info.max, count, dtype=STORED[dtype], endpoint=True)


def random_arrays(dtype: DType, num_ranks: int, count: int) -> list[Array]:
    return [random_array(dtype, count, seed=1000 * count + rank) for rank in range(num_ranks)]
