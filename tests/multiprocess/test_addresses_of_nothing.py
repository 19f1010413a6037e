"""Each entry point of the core refuses a null address with a size above 0, before it touches memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline import _core
from paceline.errors import ConfigError
from tests.harness import ranks

FLOAT32, SUM = _core.DTYPES["float32"], _core.REDUCE_OPS["sum"]
Core = Any

CALLS: dict[str, Callable[[Core, int], object]] = {
    "all_reduce": lambda core, at: core.all_reduce(0, 4, FLOAT32, SUM, 1.0, 60.0),
    "reduce": lambda core, at: core.reduce(0, 4, FLOAT32, SUM, 0, 60.0),
    "reduce_scatter from": lambda core, at: core.reduce_scatter(0, at, 4, FLOAT32, SUM, 60.0),
    "reduce_scatter to": lambda core, at: core.reduce_scatter(at, 0, 4, FLOAT32, SUM, 60.0),
    "broadcast": lambda core, at: core.broadcast(0, 16, 0, 60.0),
    "broadcast_all": lambda core, at: core.broadcast_all([at, 0], [8, 8], 0),
    "broadcast_all large": lambda core, at: core.broadcast_all([0], [1 << 20], 0),
    "all_gather from": lambda core, at: core.all_gather(0, at, 8, 60.0),
    "all_gather to": lambda core, at: core.all_gather(at, 0, 8, 60.0),
    "all_gather_pieces": lambda core, at: core.all_gather_pieces([at, 0], [8, 8], [1, 1]),
    "gather": lambda core, at: core.gather(0, at, 8, 0, 60.0),
    "scatter": lambda core, at: core.scatter(at, 0, 8, 0, 60.0),
    "all_to_all from": lambda core, at: core.all_to_all(0, [8, 8], at, [8, 8], 60.0),
    "all_to_all to": lambda core, at: core.all_to_all(at, [8, 8], 0, [8, 8], 60.0),
    "send": lambda core, at: core.start_send(0, 8, 1 - core.rank, 0),
    "recv": lambda core, at: core.start_receive(0, 8, 1 - core.rank, 0),
    "hash_all": lambda core, at: _core.hash_all([at, 0], [8, 8]),
    "sample_all": lambda core, at: _core.sample_all([0], [8]),
    "is_finite": lambda core, at: _core.is_finite(FLOAT32, 0, 4),
    "scale_array": lambda core, at: _core.scale_array(FLOAT32, 0, 4, 0.5),
    "reduce_arrays from": lambda core, at: _core.reduce_arrays(FLOAT32, SUM, [at, 0], [at], 4),
    "reduce_arrays to": lambda core, at: _core.reduce_arrays(FLOAT32, SUM, [at, at], [0], 4),
    "encode": lambda core, at: _core.encode(0, 0, 0, 0, 1.0, 4, at),
    "decode_mean": lambda core, at: _core.decode_mean(0, [at], [1.0], 4, 0),
}


@ranks(2)
def test_a_null_address_with_bytes_raises_and_does_not_crash(group: Any) -> None:
    held = np.zeros(64, np.float32)
    for name, call in CALLS.items():
        with pytest.raises(ConfigError, match=r"an address of 0 with [0-9]+ bytes behind it"):
            call(group._core, held.ctypes.data)
            raise AssertionError(name)
    group.all_reduce(whole := np.ones(3, np.float32))
    assert whole.tolist() == [2, 2, 2]


@ranks(2)
def test_a_null_address_of_size_0_is_accepted(group: Any) -> None:
    group._core.all_reduce(0, 0, FLOAT32, SUM, 1.0, 60.0)
    group._core.broadcast_all([0], [0], 0)
    assert len(_core.hash_all([0], [0])) == 1


def test_mark_copied_refuses_a_null_address_with_bytes() -> None:
    gradient_buffer = np.zeros(2, np.float32)
    marks = _core.BackwardMarks(gradient_buffer.ctypes.data, [(0, 8, [0])], lambda: False)
    with pytest.raises(ConfigError, match="mark_copied got an address of 0 with 8 bytes"):
        marks.mark_copied(0, 0, 8)
    marks.mark_copied(0, 0, 0)  # such a gradient consists of other tensors
    assert marks.is_complete(0)
