"""The C++ reducer with numpy arrays: a model is a list of (number of elements, dtype).

Gradients are a function of rank, parameter and backward, so each rank can compute the expected mean.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline import _core
from paceline.collectives.ops import DTYPE_NUMBERS

Array = np.ndarray[Any, Any]
Model = Sequence[tuple[int, str]]

BLOCK_ELEMENTS = 16384  # buckets may cut a parameter between blocks of this many elements
# Flags that finish() returns.
UNUSED, NONFINITE, FORWARDS_DIFFER, FINISHED, NOTES_DIFFER, GLOBALLY_UNUSED = 1, 2, 4, 8, 32, 64

# Odd sizes, one element more than a block, a parameter of several buckets, an empty one, and a second dtype.
MODEL: Model = [
    (1000, "float32"),
    (1, "float32"),
    (70_003, "float32"),
    (16_384, "float32"),
    (0, "float32"),
    (16_385, "float32"),
    (33, "float64"),
    (20_000, "float64"),
]


def offsets_of(model: Model) -> list[int]:
    """Byte offsets of the parameters in the gradient buffer, on cache lines, and the buffer's size."""
    offsets, at = [], 0
    for count, dtype in model:
        offsets.append(at)
        at += -(-count * np.dtype(dtype).itemsize // 64) * 64
    return [*offsets, at]


def cut(model: Model, cap_bytes: int) -> list[tuple[int, int]]:
    """Buckets of about `cap_bytes` as (begin, end) in bytes, cut only where a block ends."""
    offsets = offsets_of(model)
    buckets, begin = [], 0
    for (count, dtype), offset, next_offset in zip(model, offsets, offsets[1:]):
        size = np.dtype(dtype).itemsize
        ends = [offset + at * size for at in range(BLOCK_ELEMENTS, count, BLOCK_ELEMENTS)] + [next_offset]
        for end in ends:
            if end - begin >= cap_bytes:
                buckets.append((begin, end))
                begin = end
    return [*buckets, (begin, offsets[-1])] if begin < offsets[-1] else buckets


class World:
    """One rank's reducer and the views of its gradient buffer."""

    def __init__(
        self,
        group: Any,
        model: Model = MODEL,
        cap_bytes: int = 100_000,
        assigns_chunks: bool = False,
        owned: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        *offsets, buffer_bytes = offsets_of(model)
        self.group = group
        self.model = model
        self.reducer = _core.Reducer(
            group._core,
            buffer_bytes,
            offsets,
            [count for count, _ in model],
            [DTYPE_NUMBERS[dtype] for _, dtype in model],
            cut(model, cap_bytes),
            assigns_chunks,
            list(owned),
        )
        self._elsewhere: dict[int, Array] = {}
        memory = (ctypes.c_byte * buffer_bytes).from_address(self.reducer.buffer_pointer)
        self.views = [
            np.frombuffer(memory, dtype, count, offset) for (count, dtype), offset in zip(model, offsets)
        ]

    def gradient(self, rank: int, param: int, step: int) -> Array:
        """The gradient of `param` on `rank` in a backward: small multiples of 1/8, whose sums are exact."""
        count, dtype = self.model[param]
        pattern = (np.arange(17) * (rank + 2) + 3 * param + step) % 13 - 5
        return np.resize(pattern.astype(dtype) / 8, count)

    def mean(self, param: int, step: int, weights: Sequence[float] | None = None) -> Array:
        """The expected mean, in float64."""
        weights = weights or [1.0] * self.group.world_size
        total = np.zeros(self.model[param][0])
        for rank, weight in enumerate(weights):
            if weight:
                total += weight * self.gradient(rank, param, step)
        return total / sum(weights)

    def mark(self, param: int, step: int, elsewhere: bool = False) -> Array:
        """Mark this rank's gradient ready, in the gradient buffer or elsewhere. Returns the mean's array."""
        values = self.gradient(self.group.rank, param, step)
        if elsewhere:
            self._elsewhere[param] = values  # the reducer reads and writes it until the backward has ended
            self.reducer.mark_ready(param, values.ctypes.data)
            return values
        self.views[param][:] = values
        self.reducer.mark_ready(param, 0)
        return self.views[param]

    def check(self, got: dict[int, Array], step: int, weights: Sequence[float] | None = None) -> None:
        """Check that each array holds the mean, to 4 epsilon of its dtype."""
        for param, array in got.items():
            expected = self.mean(param, step, weights)
            epsilon = np.finfo(array.dtype).eps
            np.testing.assert_allclose(
                array,
                expected.astype(array.dtype),
                rtol=4 * epsilon,
                atol=4 * epsilon,
                err_msg=f"param {param}",
            )
