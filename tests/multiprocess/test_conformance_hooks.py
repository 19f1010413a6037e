"""Communication hooks in both front ends: each scenario is written once and run for both."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from paceline.errors import ConfigError, ModelMismatchError
from tests.multiprocess.conformance_numpy import batch
from tests.multiprocess.test_conformance import adapter, on_two_ranks

# torch's hooks call torch.distributed, so they need one of its groups.
with_hooks = pytest.mark.parametrize("framework", ["torch.distributed", "paddle", "paddle.distributed"])


@with_hooks
@on_two_ranks
def test_error_feedback_sends_values_that_are_too_small_for_a_code(group: Any, framework: str) -> None:
    """A large value in the block makes the 8-bit code round the small ones to 0 in each step."""
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


@with_hooks
@on_two_ranks
def test_buckets_hold_whole_parameters_and_exactly_them(group: Any, framework: str) -> None:
    do = adapter(framework)
    seen: list[list[Any]] = []

    def hook(state: str, bucket: Any) -> Any:
        assert state == "state"
        gradients = bucket.gradients()
        assert [list(each.shape) for each in gradients] == [list(each.shape) for each in bucket.parameters()]
        sizes = [do.as_float64(each).size for each in gradients]
        assert do.as_float64(bucket.buffer()).size == sum(sizes)
        address = bucket.buffer().data_ptr()
        for gradient, size in zip(gradients, sizes):
            assert gradient.data_ptr() == address
            address += 4 * size
        seen[-1].append((bucket.index(), bucket.is_last(), len(gradients)))
        bucket.set_buffer(bucket.buffer() * 1.0)
        assert bucket.gradients()[0].data_ptr() == bucket.buffer().data_ptr() != gradients[0].data_ptr()
        return do.mean_hook(None, bucket)

    model = do.network()
    wrapped = do.wrap(model, group, bucket_cap_mb=0.00001)
    wrapped.register_comm_hook("state", hook)
    x = np.full((1, 4), 1.0 * group.rank, np.float32)
    for _ in range(3):
        seen.append([])
        do.clear(wrapped)
        with wrapped.no_sync():
            wrapped(do.tensor(x)).sum().backward()
        wrapped(do.tensor(x)).sum().backward()
        assert_array_equal(do.gradients(model)[3], np.full(2, 2.0))
    assert seen[0] == seen[2]
    assert [index for index, _, _ in seen[0]] == list(range(len(seen[0])))
    assert [last for _, last, _ in seen[0]] == [False] * (len(seen[0]) - 1) + [True]
    assert sum(count for _, _, count in seen[0]) == 4


@with_hooks
@on_two_ranks
def test_wrong_hooks_are_refused(group: Any, framework: str) -> None:
    do = adapter(framework)
    count = sum(value.size for value in do.parameters(do.network()))
    for returned, error, text in (
        (None, TypeError, "tensor"),
        (do.ready(3), TypeError, "int"),
        (do.ready(do.tensor(np.zeros(3, np.float32))), ValueError, r"shape [\(\[]3"),
        (do.ready(do.tensor(np.zeros(count, np.int64))), ValueError, "int64"),
    ):
        wrapped = do.wrap(do.network(), group)
        wrapped.register_comm_hook(None, lambda state, bucket, returned=returned: returned)
        with pytest.raises(error, match=text):
            do.backward(do.loss(wrapped, batch()))
    wrapped = do.wrap(do.network(), group)
    with pytest.raises(TypeError, match="must be callable"):
        wrapped.register_comm_hook(None, 3)
    wrapped.register_comm_hook(None, do.mean_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        wrapped.register_comm_hook(None, do.mean_hook)
    wrapped = do.wrap(do.network(), group)
    with pytest.raises(ModelMismatchError, match="communication hook differs"):
        wrapped.register_comm_hook(None, [do.mean_hook, do.another_hook][group.rank])


@with_hooks
@on_two_ranks
def test_a_hook_that_is_none_on_one_rank_is_reported_on_both(group: Any, framework: str) -> None:
    do = adapter(framework)
    wrapped = do.wrap(do.network(), group, timeout_s=300.0)
    with pytest.raises(ConfigError) as caught:
        wrapped.register_comm_hook(None, 3 if group.rank else do.mean_hook)
    assert "hook=3" in str(caught.value)
    if group.rank == 0:
        assert "Rank 1 of 2 could not register a hook" in str(caught.value)
    do.backward(do.loss(wrapped, batch()))
