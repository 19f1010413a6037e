"""Arguments of both constructors: each scenario is written once and run for both front ends."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from paceline.errors import GraphChangedError, ReplicasDifferError
from tests.harness import kept_ranks
from tests.multiprocess.conformance_numpy import batch
from tests.multiprocess.test_conformance import adapter, both, on_two_ranks

over_groups = pytest.mark.parametrize("framework", ["torch.distributed", "paddle.distributed"])
ODD = 2  # the one of 3 ranks whose replica drifts


def clear(model: Any) -> None:
    """Set gradients to None, because zeros would count as gradients."""
    for parameter in model.parameters():
        parameter.grad = None


@both
@on_two_ranks
def test_a_graph_that_changes_against_the_promise(group: Any, framework: str) -> None:
    do, x = adapter(framework), batch(2, seed=group.rank)
    model = do.Branches()
    wrapped = do.wrap(model, group, static_graph=True)
    for _ in range(2):
        clear(model)
        do.backward(do.loss(wrapped, x, "left"))
        assert model.left.weight.grad is not None
    with pytest.raises(GraphChangedError, match="static_graph=True promised") as caught:
        # Rank 1 uses another branch; rank 0 gets the error as well.
        do.backward(do.loss(wrapped, x, "right" if group.rank else "left"))
    assert caught.value.changed == ("left.weight", "left.bias", "right.weight", "right.bias")
    assert "left.weight" in str(caught.value) and "rank 1" in str(caught.value)


@both
@on_two_ranks
def test_caps_of_single_buckets(group: Any, framework: str) -> None:
    do, kib = adapter(framework), 1 / 1024
    model = do.layers(5, 16)  # 1 KiB each
    wrapped = do.wrap(model, group, bucket_cap_mb=25, bucket_cap_mb_list=[kib, 3 * kib, kib])
    assert [bucket.nbytes for bucket in wrapped.bucket_layout()] == [1024, 3072, 1024]
    for _ in range(2):  # the second backward uses the order that the first has shown
        clear(model)
        do.backward(do.loss(wrapped, np.full((1, 16), 1.0 + group.rank, np.float32)))
        assert all(gradient.any() for gradient in do.gradients(model))
    assert [bucket.nbytes for bucket in wrapped.bucket_layout()] == [1024, 3072, 1024]


@over_groups
@on_two_ranks
def test_globally_unused_parameters_are_not_sent(
    group: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, dist = adapter(framework), importlib.import_module(framework)
    sent: list[int] = []
    # Torch's front end calls the group's backend itself.
    owner, name = dist, "all_reduce"
    if hasattr(dist, "ProcessGroup"):
        owner, name = importlib.import_module("torch._C._distributed_c10d").Backend, "allreduce"
    reduce = getattr(owner, name)

    def count(*args: Any, **options: Any) -> Any:
        (tensor,) = args[1] if owner is not dist else args[:1]
        sent.append(4 * do.as_float64(tensor).size)
        return reduce(*args, **options)

    monkeypatch.setattr(owner, name, count)
    model = do.Branches()
    model.never = do.Branches().left
    wrapped = do.wrap(
        model,
        group,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb_list=[8 / 2**20],
    )
    x = np.full((1, 4), 1.0 + group.rank, np.float32)
    bytes_of_a_layer = 2 * 64  # each gradient begins a cache line
    # The first backward shows the order of gradients; the buckets are planned by it from the second on.
    branches = ("left", "left", "left", "both", "both", "right", "right")
    for branch, layers in zip(branches, (3, 3, 1, 2, 2, 2, 1), strict=True):
        sent.clear()
        clear(model)
        wrapped(do.tensor(x), branch).sum().backward()
        assert sum(sent) == layers * bytes_of_a_layer, branch
        if framework == "torch.distributed":
            assert wrapped._get_ddp_logging_data()["num_buckets_reduced"] == len(sent)
        for name in ("left", "right"):
            if branch in (name, "both"):
                gradient = do.as_float64(getattr(model, name).weight.grad)
                assert_array_equal(gradient, np.full_like(gradient, 1.5))


@both
@pytest.mark.parametrize("drift", ["a skipped step", "another learning rate", "a write to a weight"])
@kept_ranks(3, framework="framework")
def test_the_next_check_names_rank_and_parameter(group: Any, framework: str, drift: str) -> None:
    do, x = adapter(framework), batch(6, seed=group.rank)
    for every in (1, 2):
        model = do.network()
        wrapped = do.wrap(model, group, check_replicas_every=every)

        def backward(wrapped: Any = wrapped) -> None:
            do.clear(wrapped)
            do.backward(do.loss(wrapped, x))

        for _ in range(2):
            backward()
            do.step(model)
        backward()
        if group.rank != ODD or drift == "a write to a weight":
            do.step(model)
        elif drift == "another learning rate":
            do.step(model, 0.1001)
        if group.rank == ODD and drift == "a write to a weight":
            do.nudge(model[2].weight)
        first = "2.weight" if drift == "a write to a weight" else "0.weight"
        with pytest.raises(ReplicasDifferError, match=f"Rank 2 of 3 .*parameter '{first}'") as caught:
            backward()
        assert caught.value.ranks == (ODD,)
        assert next(iter(caught.value.differing)) == first


@both
@pytest.mark.parametrize("layer", [1, 6, 11, 12])
@kept_ranks(2, framework="framework")
def test_a_parameter_that_one_rank_alone_writes_is_found_when_it_has_its_turn(
    group: Any, framework: str, layer: int
) -> None:
    do, x = adapter(framework), batch(2, seed=group.rank)
    model = do.layers(16, 4)  # each backward checks four of its parameters
    wrapped = do.wrap(model, group)
    for number in range(8):
        do.clear(wrapped)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            do.backward(do.loss(wrapped, x))
        do.step(model)
        if any(f"'{layer}.weight'" in str(each.message) for each in caught):
            break
        if number == 2 and group.rank == 1:
            do.nudge(model[layer].weight)
    else:
        raise AssertionError("not found")
    assert 3 <= number <= 6
