"""The script catches an exception of backward, in both front ends: gradients that it clears stay cleared.

The reference is plain numpy on the whole batch, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import SkippedPassError
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


def all_zero(arrays: list[np.ndarray | None]) -> bool:
    return all(array is None or not array.any() for array in arrays)


@both
@views
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("place", [0, 3])
@on_two_ranks
def test_what_is_cleared_after_an_exception_stays_cleared(
    group: Any, framework: str, view: bool, unused: bool, place: int
) -> None:
    do, x = adapter(framework), batch()
    own = np.split(x, 2)[group.rank]
    model = do.trapped()
    wrapped = do.wrap(
        model,
        group,
        gradient_as_bucket_view=view,
        find_unused_parameters=unused,
        bucket_cap_mb=0.00005,  # each gradient is reduced as soon as it is ready
    )
    for _ in range(2):
        do.backward(do.loss(wrapped, own))
        close(do.gradients(model), reference.gradients(reference.initial(), x))
        do.clear_in_place(model)
        loss = do.loss(wrapped, own)
        model[place].is_set = True
        if group.rank == 0:  # rank 1 has marked its gradients ready, raised, and cleared them
            group.barrier()
        with pytest.raises(OSError, match="backward of a trap"):
            do.backward(loss)
        model[place].is_set = False
        do.clear_in_place(model)
        if group.rank == 1:
            group.barrier()
        group.barrier()
        assert all_zero(do.gradients(model))
        loss = do.loss(wrapped, own)  # ends the interrupted backward
        assert all_zero(do.gradients(model))
        do.backward(loss)
        close(do.gradients(model), reference.gradients(reference.initial(), x))
        same_on_all_ranks(do.gradients(model), group)
        do.clear_in_place(model)


@both
@views
@on_two_ranks
def test_all_ranks_raise_if_those_that_have_data_are_interrupted(
    group: Any, framework: str, view: bool
) -> None:
    """The rank without data does not step with what was left of the backward."""
    do, x = adapter(framework), batch()
    own = np.split(x, 2)[group.rank]
    model = do.trapped()
    wrapped = do.wrap(model, group, gradient_as_bucket_view=view)
    do.backward(do.loss(wrapped, own))
    do.clear_in_place(model)
    steps: list[int] = []
    if group.rank == 0:
        with pytest.raises(SkippedPassError, match="rank 1 of 2 ended in an exception"):
            wrapped.finish(lambda: steps.append(1))
    else:
        loss = do.loss(wrapped, own)
        model[0].is_set = True
        with pytest.raises(OSError, match="backward of a trap"):
            do.backward(loss)
        model[0].is_set = False
    assert not steps
    do.clear_in_place(model)
    do.backward(do.loss(wrapped, own))
    close(do.gradients(model), reference.gradients(reference.initial(), x))


@both
@on_two_ranks
def test_a_weighed_micro_batch_that_raised_leaves_no_weight(group: Any, framework: str) -> None:
    do, quarters = adapter(framework), np.split(batch(), 4)
    own, weight = quarters[2 * group.rank :][:2], 1 + 2 * group.rank
    parts = [reference.gradients(reference.initial(), part) for part in quarters]
    expected = [(a + b + 3 * c + 3 * d) / 8 for a, b, c, d in zip(*parts)]
    model = do.trapped()
    wrapped = do.wrap(model, group)
    for _ in range(2):
        with wrapped.no_sync():
            broken, whole = do.loss(wrapped, own[0]), do.loss(wrapped, own[0])
            model[0].is_set = True
            with wrapped.weight(100), pytest.raises(OSError, match="backward of a trap"):
                do.backward(broken)
            model[0].is_set = False
            do.clear_in_place(model)
            with wrapped.weight(weight):
                do.backward(whole)
        with wrapped.weight(weight):
            do.backward(do.loss(wrapped, own[1]))
        close(do.gradients(model), expected)
        do.clear_in_place(model)


@pytest.mark.parametrize("how", ["next forward", "next backward", "weights", "accumulated"])
@both
@on_two_ranks
def test_scripts_that_catch_errors_step_by_step_stay_in_step(group: Any, framework: str, how: str) -> None:
    """Each rank raises once for an exception of one rank, and all go on with the same step."""
    do, batches = adapter(framework), [batch(seed=seed) for seed in range(6)]
    model = do.trapped()
    wrapped = do.wrap(model, group, bucket_cap_mb=0.00005)
    given = 1.0 + 2 * group.rank if how == "weights" else 1.0
    weights = [1.0, 3.0] if how == "weights" else [1.0, 1.0]
    caught: list[str] = []
    waiting: list[Any] = []  # losses of forwards that were run one step ahead
    for step, x in enumerate(batches):
        fails = step in (1, 2, 4) and group.rank == step % 2
        own = np.split(x, 2)[group.rank]
        do.clear_in_place(model)
        try:
            if how == "next backward":
                if step % 2 == 0:
                    ahead = np.split(batches[step + 1], 2)[group.rank]
                    waiting = [do.loss(wrapped, own), do.loss(wrapped, ahead)]
                loss = waiting[step % 2]
            else:
                if how == "weights":
                    wrapped.weight(given)
                loss = do.loss(wrapped, own)
                if how == "accumulated":
                    with wrapped.no_sync():
                        do.backward(loss)
                    loss = do.loss(wrapped, own)
            model[0].is_set = fails
            do.backward(loss)
        except (OSError, SkippedPassError) as error:
            caught.append(type(error).__name__)
            assert ("backward of a trap" in str(error)) is fails
            continue
        finally:
            model[0].is_set = False
        parts = [reference.gradients(reference.initial(), part) for part in np.split(x, 2)]
        scale = (2 if how == "accumulated" else 1) / sum(weights)
        close(do.gradients(model), [scale * (weights[0] * a + weights[1] * b) for a, b in zip(*parts)])
        same_on_all_ranks(do.gradients(model), group)
    assert len(caught) == 3, caught
