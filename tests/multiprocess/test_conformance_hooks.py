"""Communication hooks in both front ends: each scenario is written once."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.multiprocess.test_conformance import adapter, on_two_ranks

# torch's hooks call torch.distributed, so they need one of its groups.
with_hooks = pytest.mark.parametrize("framework", ["torch.distributed", "paddle", "paddle.distributed"])


@with_hooks
@on_two_ranks
def test_error_feedback_brings_what_is_too_small_for_a_code(group: Any, framework: str) -> None:
    """A large value in the block makes 8 bits round the small ones to 0, each time."""
    do = adapter(framework)
    compression = importlib.import_module(f"paceline.{framework.partition('.')[0]}.compression")
    x = np.full(40, 0.001, np.float32)
    x[0] = 1.0
    arrived = {}
    for feedback in (True, False):
        model = do.Factors("float32")
        state = compression.EightBitCompression(error_feedback=feedback)
        wrapped = do.wrap(model, group)
        wrapped.register_comm_hook(state, compression.eight_bit_hook)
        for _ in range(20):
            do.clear(wrapped)
            wrapped(x).backward()
            arrived[feedback] = arrived.get(feedback, 0) + do.as_float64(model.weight.grad)
        assert (state.error_of(model.weight) is not None) == feedback
    assert_allclose(arrived[True], np.tile(20 * x, (3, 1)), rtol=0, atol=0.5 / 127)
    assert not arrived[False][:, 1:].any()
