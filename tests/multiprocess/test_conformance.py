"""Scenarios that both front ends must pass: each is written once and run for both.

The reference is plain numpy on the whole batch, in float64.
"""

from __future__ import annotations

import importlib
import itertools
import os
import warnings
from types import ModuleType

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from paceline.errors import (
    ConfigError,
    DeadlineError,
    ForkedError,
    ModelMismatchError,
    NonFiniteGradientError,
    SkippedPassError,
    UnusedParameterError,
)
from tests.harness import kept_ranks
from tests.harness.rank_main import use_up
from tests.multiprocess import conformance_numpy as reference
from tests.multiprocess.conformance_numpy import Arrays, batch
from tests.multiprocess.rank_signals import publish, wait_until_published

both = pytest.mark.parametrize("framework", ["torch", "torch.distributed", "paddle", "paddle.distributed"])
views = pytest.mark.parametrize("view", [False, True])
on_two_ranks = kept_ranks(2, framework="framework")


def adapter(framework: str) -> ModuleType:
    return importlib.import_module(f"tests.multiprocess.conformance_{framework.replace('.', '_')}")


def close(found: Arrays, expected: Arrays) -> None:
    assert len(found) == len(expected)
    for some, others in zip(found, expected):
        assert_allclose(some, others, rtol=1e-5, atol=1e-6)


def same_on_all_ranks(arrays: Arrays, group: object) -> None:
    for array in arrays:
        gathered = group.all_gather(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        assert all(np.array_equal(gathered[0], other) for other in gathered)


@both
@on_two_ranks
def test_training_equals_one_process_with_the_whole_batch(group: object, framework: str) -> None:
    do, batches = adapter(framework), [batch(seed=seed) for seed in range(3)]
    results = []
    for cap, view, clear in itertools.product((25, 0.00005), (False, True), do.CLEARS):
        model = do.network()
        wrapped = do.wrap(model, group, bucket_cap_mb=cap, gradient_as_bucket_view=view)
        for x in batches:
            clear(wrapped)
            do.backward(do.loss(wrapped, np.split(x, 2)[group.rank]))
            do.step(model)
        close(do.parameters(model), reference.trained(batches))
        same_on_all_ranks(do.parameters(model) + do.gradients(model), group)
        results.append(do.parameters(model))
    for other in results[1:]:  # bit for bit the same, whatever the size of a bucket
        assert all(np.array_equal(some, same) for some, same in zip(results[0], other))


@both
@on_two_ranks
def test_the_layout_of_buckets_is_reported(group: object, framework: str) -> None:
    do, x = adapter(framework), batch()
    # The second layer just fits into the first bucket: one parameter begins at byte 0, the other at byte 64.
    wrapped = do.wrap(do.network(), group, bucket_cap_mb_list=[104 / 2**20, 25])
    planned = wrapped.bucket_layout()
    # Reverse order of registration, before a backward has shown the order of the gradients.
    assert [bucket.parameters for bucket in planned] == [("2.bias", "2.weight"), ("0.bias", "0.weight")]
    do.backward(do.loss(wrapped, np.split(x, 2)[group.rank]))
    seen = wrapped.bucket_layout()
    for layout in (planned, seen):
        sizes = [dict(zip(bucket.parameters, bucket.sizes_bytes)) for bucket in layout]
        assert sizes == [{"2.bias": 8, "2.weight": 40}, {"0.bias": 20, "0.weight": 80}]
        assert [bucket.nbytes for bucket in layout] == [128, 192]  # each gradient begins a cache line
        assert {(bucket.dtype, bucket.device) for bucket in layout} == {("float32", "cpu")}


@both
@on_two_ranks
def test_gradients_keep_their_dtype(group: object, framework: str) -> None:
    do = adapter(framework)
    for dtype, view in itertools.product(do.DTYPES, (False, True)):
        model = do.Factors(dtype)
        do.wrap(model, group, gradient_as_bucket_view=view)(1.0 + 2 * group.rank).backward()
        assert str(model.weight.grad.dtype).endswith(dtype)
        assert_array_equal(do.as_float64(model.weight.grad), np.full((3, 40), 2.0))


@both
@views
@on_two_ranks
def test_accumulation_and_several_backwards(group: object, framework: str, view: bool) -> None:
    do, x = adapter(framework), batch()
    own = np.split(x, 2)[group.rank]
    for inside in ("forward and backward", "backward"):
        model = do.network()
        wrapped = do.wrap(model, group, gradient_as_bucket_view=view)
        for times in (1, 2):  # the second time on top of the first
            if inside == "backward":
                loss = do.loss(wrapped, own[:2])
                with wrapped.no_sync():
                    do.backward(loss)
            else:
                with wrapped.no_sync():
                    do.backward(do.loss(wrapped, own[:2]))
            local = do.gradients(model)
            assert wrapped.num_good_passes == times - 1
            do.backward(do.loss(wrapped, own[2:]))
            assert wrapped.num_good_passes == times
            assert not np.array_equal(local[0], do.gradients(model)[0])
            quarters = [reference.gradients(reference.initial(), part) for part in np.split(x, 4)]
            close(do.gradients(model), [times * sum(parts) / 2 for parts in zip(*quarters)])
    do.clear(wrapped)
    do.backward(do.loss(wrapped, own), do.loss(wrapped, own))  # two backward passes in one step
    close(do.gradients(model), [2 * g for g in reference.gradients(reference.initial(), x)])


@both
@on_two_ranks
def test_weights_give_the_mean_over_all_samples(group: object, framework: str) -> None:
    """Rank 0 has micro-batches of 1 and 3 samples; rank 1 has one of 2 samples and one of weight 0."""
    do, x = adapter(framework), batch(6)
    parts = [x[:1], x[1:4]] if group.rank == 0 else [x[4:], np.full((5, 4), np.nan, np.float32)]
    expected = reference.gradients(reference.initial(), x)

    by_call = do.network()
    wrapped = do.wrap(by_call, group)
    counts = [len(part) if np.isfinite(part).all() else 0 for part in parts]
    for part, count, is_last in zip(parts, counts, (False, True)):
        wrapped.require_backward_grad_sync = wrapped.grad_need_sync = is_last
        with wrapped.weight(count):
            do.backward(do.loss(wrapped, part))
    close(do.gradients(by_call), expected)

    by_function = do.network()
    wrapped = do.wrap(by_function, group, weight=lambda part: len(part))
    own = x[:4] if group.rank == 0 else x[4:]
    do.backward(do.loss(wrapped, own))
    close(do.gradients(by_function), expected)
    with pytest.raises(ConfigError, match="is not usable"):
        wrapped.weight(-1)


@both
@on_two_ranks
def test_hooks_of_users_see_gradients_without_weights(group: object, framework: str) -> None:
    do, x = adapter(framework), batch(4)
    parts, weights = np.split(x, 4), (1.0, 3.0, 2.0, 5.0)
    gradients = [reference.gradients(reference.initial(), part) for part in parts]
    clipped = [[g.clip(-0.1, 0.1) for g in each] for each in gradients]
    expected = [np.average(column, axis=0, weights=weights) for column in zip(*clipped)]
    model = do.network()
    wrapped = do.wrap(model, group)
    wrapped.weight(1.0)  # before the user registers hooks
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clip(-0.1, 0.1))
    for which, is_last in enumerate((False, True), 2 * group.rank):
        wrapped.require_backward_grad_sync = wrapped.grad_need_sync = is_last
        with wrapped.weight(weights[which]):
            do.backward(do.loss(wrapped, parts[which]))
    close(do.gradients(model), expected)


@both
@views
@on_two_ranks
def test_weights_leave_gradients_alone_that_no_micro_batch_touches(
    group: object, framework: str, view: bool
) -> None:
    do, x = adapter(framework), batch(2)
    for how, branch in (("frozen", "both"), ("unused", "right")):
        model = do.Branches()
        wrapped = do.wrap(model, group, find_unused_parameters=how == "unused", gradient_as_bucket_view=view)
        do.backward(do.loss(wrapped, x, "both"))
        before = do.as_float64(model.left.weight.grad).copy()
        if how == "frozen":
            do.freeze(model.left.weight)
            do.freeze(model.left.bias)
        for is_last in (False, True):
            wrapped.require_backward_grad_sync = wrapped.grad_need_sync = is_last
            with wrapped.weight(1 + group.rank * is_last), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Paddle's front end warns of parameters without a gradient
                do.backward(do.loss(wrapped, x, branch))
        after = do.as_float64(model.left.weight.grad)
        close([after], [before])
        same_on_all_ranks([after], group)


@both
@on_two_ranks
def test_a_rank_that_has_finished_takes_part_until_all_have(group: object, framework: str) -> None:
    do, x = adapter(framework), batch()
    model = do.network()
    wrapped = do.wrap(model, group)
    halves = np.split(x, 2)
    for _ in range((1, 3)[group.rank]):
        do.clear(wrapped)
        do.backward(do.loss(wrapped, halves[group.rank]))
        do.step(model)
    wrapped.finish()
    assert wrapped.num_good_passes == 3  # the last backward, in which no rank had data, averaged nothing
    close(do.parameters(model), reference.trained([x, halves[1], halves[1]]))
    same_on_all_ranks(do.parameters(model), group)
    do.clear(wrapped)
    do.backward(do.loss(wrapped, halves[group.rank]))  # and training may go on
    same_on_all_ranks(do.gradients(model), group)


@both
@on_two_ranks
def test_finished_twice_without_a_backward_between(group: object, framework: str) -> None:
    do, x = adapter(framework), batch()
    model = do.network()
    wrapped = do.wrap(model, group)
    do.backward(do.loss(wrapped, np.split(x, 2)[group.rank]))
    for _ in range(2):
        wrapped.finish()
    assert wrapped.num_good_passes == 1
    same_on_all_ranks(do.parameters(model), group)


@both
@on_two_ranks
def test_a_rank_without_data_weighs_as_before_after_an_error(group: object, framework: str) -> None:
    """finish() gives it weight 0 in the others' steps; after an error that is caught, it counts again."""
    do, x = adapter(framework), batch()
    model = do.network()
    wrapped = do.wrap(model, group, nonfinite="raise")
    with pytest.raises(NonFiniteGradientError):
        if group.rank == 0:
            wrapped.finish()
        else:
            do.backward(do.loss(wrapped, np.full_like(x, np.nan)))
    do.clear(wrapped)
    do.backward(do.loss(wrapped, np.split(x, 2)[group.rank]))
    close(do.gradients(model), reference.gradients(reference.initial(), x))


@both
@on_two_ranks
def test_norm_and_clipping(group: object, framework: str) -> None:
    do, x = adapter(framework), batch()
    model = do.network()
    wrapped = do.wrap(model, group)
    expected = reference.gradients(reference.initial(), x)
    for _ in range(3):  # the first norm is computed, the later ones come with the backward
        do.clear(wrapped)
        do.backward(do.loss(wrapped, np.split(x, 2)[group.rank]))
        assert wrapped.grad_norm() == pytest.approx(reference.norm(expected), rel=1e-5)
        assert float(wrapped.clip_grad_norm_(0.5)) == pytest.approx(reference.norm(expected), rel=1e-5)
        close(do.gradients(model), [g * 0.5 / reference.norm(expected) for g in expected])
        same_on_all_ranks(do.gradients(model), group)
        # Clipping changed the gradient, so the norm that came with the backward is out of date.
        assert float(wrapped.clip_grad_norm_(9.0)) == pytest.approx(0.5, rel=1e-4)


@both
@on_two_ranks
def test_infinities_name_ranks_and_parameters(group: object, framework: str) -> None:
    do, x = adapter(framework), batch(2)
    if group.rank == 1:
        x[0, 0] = np.inf
    loud = do.wrap(do.network(), group, nonfinite="raise")
    with pytest.raises(NonFiniteGradientError, match="on rank 1 of 2"):
        do.backward(do.loss(loud, x))
    wrapped = do.wrap(do.network(), group)
    with pytest.warns(RuntimeWarning, match="reported once"):
        do.backward(do.loss(wrapped, x))
    assert set(wrapped.nonfinite()) == {1} and "0.weight" in wrapped.nonfinite()[1]
    do.clear(wrapped)
    do.backward(do.loss(wrapped, batch(2)))
    assert wrapped.nonfinite() == {}


@both
@on_two_ranks
def test_parameters_that_one_rank_does_not_use(group: object, framework: str) -> None:
    do, x = adapter(framework), batch(2)
    branch = ("left", "right")[group.rank]
    strict = do.wrap(do.Branches(), group)
    with pytest.raises(UnusedParameterError, match=r"rank 1: left.weight, left.bias\s+rank 0: right.weight"):
        do.backward(do.loss(strict, x, branch))
    model = do.Branches()
    wrapped = do.wrap(model, group, find_unused_parameters=True)
    backwards = []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        do.backward(do.loss(wrapped, x, branch))
        backwards.append(do.gradients(model))
        assert all(g is not None and g.any() for g in backwards[-1])
        same_on_all_ranks(backwards[-1], group)
        # no gradient of an earlier backward replaces a missing one
        close(backwards[-1], backwards[0])


@both
@on_two_ranks
def test_a_skipped_backward_is_named_on_every_rank(group: object, framework: str) -> None:
    do, x = adapter(framework), batch(2)
    wrapped = do.wrap(do.network(), group)
    loss = do.loss(wrapped, x)
    if group.rank == 1:
        loss = do.loss(wrapped, x)
    with pytest.raises(SkippedPassError, match="Rank 1 of 2 skipped"):
        do.backward(loss)
    do.backward(do.loss(wrapped, x))  # the next backward succeeds


@both
@kept_ranks(3, framework="framework")
def test_different_models_are_refused_on_every_rank(group: object, framework: str) -> None:
    do = adapter(framework)
    with pytest.raises(ModelMismatchError, match=r"left\.weight"):
        do.wrap(do.Branches() if group.rank else do.network(), group)
    shape = r"shape \((6, 4|4, 6)\)"  # torch's layout, or Paddle's
    with pytest.raises(ModelMismatchError, match=rf"(?s)'0\.weight'.*rank 1: 0\.weight, {shape}"):
        do.wrap(do.network(6 if group.rank == 1 else 5), group)
    with pytest.raises(ModelMismatchError, match="bucket_cap_mb"):
        do.wrap(do.network(), group, bucket_cap_mb=1 + group.rank)
    model = do.network()
    if group.rank == 2:
        do.freeze(model[2].bias)
    with pytest.raises(ModelMismatchError, match=r"(?s)'2\.bias': trainable differs.*rank 2: "):
        do.wrap(model, group)
    do.backward(do.loss(do.wrap(do.network(), group), batch()))  # the refused wrappers leave nothing behind


@both
@on_two_ranks
def test_a_forked_child_is_refused(group: object, framework: str) -> None:
    do, x = adapter(framework), batch()
    wrapped = do.wrap(do.network(), group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        try:
            do.loss(wrapped, x)
        except ForkedError:
            os._exit(3)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    do.backward(do.loss(wrapped, x))


@both
@on_two_ranks
def test_a_late_rank_is_an_error_at_the_time_out(group: object, framework: str) -> None:
    do, x = adapter(framework), batch()
    wrapped = do.wrap(do.network(), group, timeout_s=3.0)
    do.backward(do.loss(wrapped, x))
    use_up()  # one rank does not make a call of the process group
    if group.rank == 1:
        wait_until_published("raised", [0])
        return
    with pytest.raises(DeadlineError, match=r"(?s)ank 1 .*3\.0 s") as caught:
        do.backward(do.loss(wrapped, x))
    publish("raised", 0)
    assert caught.value.late == (1,)
    assert "after backward of iteration 1" in str(caught.value)


@both
@on_two_ranks
def test_buffers_are_broadcast_averaged_or_left_alone(group: object, framework: str) -> None:
    do, own = adapter(framework), batch(4, seed=group.rank)
    found = {}
    for name, options in {
        "broadcast": {},
        "local": {"broadcast_buffers": False},
        "average": {"buffers": {do.STATISTIC: "average"}},
    }.items():
        model = do.normalised()
        wrapped = do.wrap(model, group, **options)
        do.backward(do.loss(wrapped, own))
        found[name] = do.statistic(model)
        gathered = group.all_gather(found[name])
        assert np.array_equal(gathered[0], gathered[1]) == (name != "local")
        if name == "local":
            wrapped.sync_buffers()
            assert_array_equal(do.statistic(model), gathered[0])
    with pytest.raises(ConfigError, match="is not usable"):
        do.wrap(do.normalised(), group, buffers={"*": "shout"})
