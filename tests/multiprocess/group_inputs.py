"""Inputs that every rank can compute for all ranks, their results in numpy, and memory to put them in.

All values are small and exact in every dtype, so a result does not depend on the order of a sum.
tests/unit/test_kernels.py tests the kernels' rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FLOATS = ("float32", "float64", "float16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
# The core's limits (cpp/core/region_layout.h): inputs of up to SMALL_BYTES are staged at once, larger ones in
# pieces of PIECE_BYTES.
SMALL_BYTES = 16 * 1024
PIECE_BYTES = 256 * 1024
PLACEMENTS = ("plain", "region", "shifted", "mixed")


def edge_counts(dtype: str, blocks: int = 1) -> list[int]:
    """Numbers of elements around the limits; `blocks`: into how many blocks the core cuts a piece.

    Two dtypes get all edges. The code paths of the others are the same, so fewer counts suffice.
    """
    size = np.dtype(dtype).itemsize
    small, piece = SMALL_BYTES // blocks // size, PIECE_BYTES // blocks // size
    if dtype not in ("float32", "int16"):
        return [3, small + 1, piece + 1]
    return [0, 1, small - 1, small, small + 1, piece - 1, piece, piece + 1, 2 * piece + 1013]


def values_of(rank: int, count: int, dtype: str) -> Array:
    """Rank `rank`'s input: multiples of 12, so that the mean over 1, 2, 3 or 4 ranks is exact."""
    pattern = (np.arange(7 * 13) * (rank + 3) + rank) % 7 * 12 + np.arange(7 * 13) % 2 * 24
    return np.resize(pattern > 40 if dtype == "bool" else pattern.astype(dtype), count)


def reduced(inputs: list[Array], op: str) -> Array:
    """The result in numpy."""
    stacked = np.stack(inputs)
    if stacked.dtype == np.bool_:
        both, either = np.logical_and.reduce(stacked), np.logical_or.reduce(stacked)
        return either if op in ("sum", "max") else both
    if op == "mean":
        return (stacked.sum(0, dtype=np.float64) / len(inputs)).astype(stacked.dtype)
    with np.errstate(over="ignore"):
        if op == "product":  # in the dtype itself; float16 overflows to infinity
            return np.multiply.reduce(stacked, 0, dtype=stacked.dtype)
        return {"sum": np.add, "min": np.minimum, "max": np.maximum}[op].reduce(
            stacked, 0, dtype=stacked.dtype
        )


def ops_of(dtype: str) -> tuple[str, ...]:
    return ("sum", "min", "max", "product", *(("mean",) if dtype in FLOATS else ()))


class Places:
    """Puts arrays into shared memory: at equal or different offsets, or on rank 0 only.

    Args:
        group: Its shared memory is allocated once; the arrays are views of it.
        nbytes: Size of the largest array.
    """

    def __init__(self, group: Any, nbytes: int) -> None:
        self._rank = group.rank
        self._room = group.allocate(nbytes + 64 * (group.world_size + 1), np.uint8)

    def put(self, values: Array, placement: str) -> Array:
        """A copy of `values`, placed as one of PLACEMENTS says."""
        if placement == "plain" or (placement == "mixed" and self._rank != 0):
            return values.copy()
        begin = 64 * self._rank if placement == "shifted" else 0
        view = self._room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
        view[...] = values
        return view
