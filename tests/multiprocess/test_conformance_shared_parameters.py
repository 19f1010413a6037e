"""Parameters of two wrapped models, in both front ends: each averages in backwards of its own outputs.

The reference is the framework itself without a wrapper, in one process with the whole batch.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from tests.multiprocess import conformance_numpy as reference
from tests.multiprocess.conformance_numpy import batch
from tests.multiprocess.test_conformance import (
    adapter,
    both,
    close,
    on_two_ranks,
    same_on_all_ranks,
    views,
)


def check_gradients(do: Any, group: Any, pair: Any, alone: Any) -> None:
    """Gradients of two wrapped models equal those of the unwrapped models, and are the same on all ranks."""
    for ours, expected in zip(pair, alone):
        found, wanted = do.gradients(ours), do.gradients(expected)
        assert [g is None for g in found] == [g is None for g in wanted]
        close([g for g in found if g is not None], [g for g in wanted if g is not None])
        same_on_all_ranks([g for g in found if g is not None], group)


@both
@views
@pytest.mark.parametrize("old", ["rebound", "kept", "lingers in a loss", "collected"])
@on_two_ranks
def test_a_network_that_is_wrapped_anew(group: Any, framework: str, view: bool, old: str) -> None:
    do, batches = adapter(framework), [batch(seed=seed) for seed in range(6)]
    model, kept = do.network(), []
    for number, x in enumerate(batches):
        if number % 2 == 0:
            if old == "collected":
                wrapped = None
                gc.collect()
            wrapped = do.wrap(model, group, gradient_as_bucket_view=view, bucket_cap_mb=0.00005)
            kept += [wrapped] if old == "kept" else []
        do.clear(model)
        loss = do.loss(wrapped, np.split(x, 2)[group.rank])
        do.backward(loss)
        kept += [loss] if old == "lingers in a loss" else []
        same_on_all_ranks(do.gradients(model), group)
        do.step(model)
    close(do.parameters(model), reference.trained(batches))
    same_on_all_ranks(do.parameters(model), group)


@both
@views
@on_two_ranks
def test_after_its_wrapper_is_gone_a_network_waits_for_no_rank(
    group: Any, framework: str, view: bool
) -> None:
    do, x = adapter(framework), batch()
    model = do.network()
    loss = do.loss(do.wrap(model, group, gradient_as_bucket_view=view), np.split(x, 2)[group.rank])
    do.backward(loss)  # the wrapper has been freed before
    close(do.gradients(model), reference.gradients(reference.initial(), x))
    if group.rank == 0:
        do.clear(model)
        do.backward(do.loss(model, x))
        close(do.gradients(model), reference.gradients(reference.initial(), x))


@both
@views
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("how", ["one loss", "a backward each", "in turn"])
@on_two_ranks
def test_two_models_with_one_encoder(group: Any, framework: str, view: bool, unused: bool, how: str) -> None:
    do = adapter(framework)
    pair, alone = do.with_one_encoder(), do.with_one_encoder()
    wrapped = [
        do.wrap(
            each, group, gradient_as_bucket_view=view, find_unused_parameters=unused, bucket_cap_mb=0.00005
        )
        for each in pair
    ]

    def backward(models: Any, x: np.ndarray, number: int) -> None:
        losses = [do.loss(each, x) for each in models]
        if how == "one loss":
            do.backward(losses[0] * 2 + losses[1])
        elif how == "a backward each":
            do.backward(*losses)
        else:
            do.backward(do.loss(models[number % 2], x))

    for number in range(4):
        x = batch(seed=number)
        for models, part in ((wrapped, np.split(x, 2)[group.rank]), (alone, x)):
            backward(models, part, number)
        check_gradients(do, group, pair, alone)
        if number == 1:  # the other backwards accumulate
            for each in (*pair, *alone):
                do.clear(each)


@both
@views
@pytest.mark.parametrize("is_shared", [False, True])
@on_two_ranks
def test_two_models_of_which_ranks_use_other_parameters(
    group: Any, framework: str, view: bool, is_shared: bool
) -> None:
    do, x = adapter(framework), batch()
    own = np.split(x, 2)[group.rank]
    pair = do.Branches(), do.Branches()
    if is_shared:
        pair[1].left = pair[0].left
    wrapped = [
        do.wrap(each, group, gradient_as_bucket_view=view, find_unused_parameters=True, bucket_cap_mb=1e-6)
        for each in pair
    ]
    branches = ("left", "both"), ("right", "left")  # of each model, by rank
    expected = [_means(do.parameters(each), of, x) for each, of in zip(pair, zip(*branches))]
    if is_shared:
        both = [sum(grads) for grads in zip(expected[0][:2], expected[1][:2])]
        expected = [[*both, *each[2:]] for each in expected]
    for _ in range(3):
        for each in pair:
            do.clear(each)
        losses = [do.loss(each, own, branch) for each, branch in zip(wrapped, branches[group.rank])]
        do.backward(losses[0] + losses[1])
        for each, wanted in zip(pair, expected):
            close(do.gradients(each), wanted)
            same_on_all_ranks(do.gradients(each), group)


def _means(parameters: Any, branches: Any, x: np.ndarray) -> list[np.ndarray]:
    """The mean gradients of a model of two linear layers; `branches` says which ones each rank uses."""
    sums = [np.zeros_like(parameter, np.float64) for parameter in parameters]
    for part, branch in zip(np.split(x.astype(np.float64), 2), branches):
        used = [number for number, name in enumerate(("left", "right")) if branch in (name, "both")]
        y = sum(part @ parameters[2 * number] + parameters[2 * number + 1] for number in used)
        for number in used:
            sums[2 * number] += part.T @ y * 2 / y.size
            sums[2 * number + 1] += y.sum(0) * 2 / y.size
    return [each / 2 for each in sums]


ROWS = [2]  # rank 0 has two rows of the whole batch, rank 1 the others


@both
@pytest.mark.parametrize("weighs", ["forwards", "backwards"])
@pytest.mark.parametrize("how", ["one loss", "a backward each", "the second first", "in turn"])
@on_two_ranks
def test_weights_of_two_models_with_one_encoder(group: Any, framework: str, weighs: str, how: str) -> None:
    do = adapter(framework)
    pair, alone = do.with_one_encoder(), do.with_one_encoder()
    options = {"weight": len} if weighs == "forwards" else {}
    wrapped = [do.wrap(each, group, find_unused_parameters=True, **options) for each in pair]

    def backward(models: Any, x: np.ndarray, number: int) -> None:
        used = [models[number % 2]] if how == "in turn" else models
        if weighs == "backwards" and models is wrapped:
            for each in used:
                each.weight(len(x))
        losses = [do.loss(each, x) for each in used]
        if how == "one loss":
            do.backward(losses[0] * 2 + losses[1])
        else:
            do.backward(*(losses if how == "a backward each" else reversed(losses)))

    for number in range(4):
        x = batch(8, seed=number)
        for models, part in ((wrapped, np.split(x, ROWS)[group.rank]), (alone, x)):
            backward(models, part, number)
        check_gradients(do, group, pair, alone)
        if number == 1:  # the other backwards accumulate
            for each in (*pair, *alone):
                do.clear(each)


@both
@pytest.mark.parametrize(
    "how", ["one has none", "they differ on rank 1", "micro-batches", "micro-batches of one"]
)
@on_two_ranks
def test_weights_that_one_gradient_of_two_models_cannot_have(group: Any, framework: str, how: str) -> None:
    do = adapter(framework)
    pair = do.with_one_encoder()
    first, second = (do.wrap(each, group, find_unused_parameters=True) for each in pair)
    x = np.split(batch(8), ROWS)[group.rank]

    def backward(*models: Any) -> None:
        for each in models:
            each.weight(len(x))
        if how == "they differ on rank 1":
            second.weight(len(x) + group.rank)
        losses = [do.loss(each, x) for each in (first, second)]
        do.backward(losses[0] + losses[1])

    with pytest.raises(ConfigError, match=r"another wrapped model(?s:.*)0\.weight") as found:
        if how == "one has none":
            backward(first)
        elif how == "they differ on rank 1":
            backward(first, second)
        elif how == "micro-batches":
            with first.no_sync(), second.no_sync():
                backward(first, second)
            backward(first, second)
        else:  # the second micro-batch would be added to the other model's mean
            for is_last in (False, True):
                with contextlib.nullcontext() if is_last else first.no_sync():
                    first.weight(len(x))
                    do.backward(do.loss(first, x))
                if not is_last:
                    do.backward(do.loss(second, x))
    assert ("rank 1 of 2" if "rank 1" in how else "all 2 ranks") in str(found.value)
    for each in pair:
        do.clear(each)
    for each in (first, second):  # all ranks can go on
        each.weight(len(x))
        do.backward(do.loss(each, x))
    same_on_all_ranks(do.gradients(pair[1]), group)
