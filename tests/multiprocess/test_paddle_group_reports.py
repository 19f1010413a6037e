"""Reports of a backward over Paddle's process group: in a host's memory, or over the group between hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose

from paceline.errors import MismatchError, PeerLostError, UnusedParameterError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    Branches,
    batch,
    gradients,
    join_paddle,
    ranks,
    share,
    squares,
    train,
    two_layers,
)
from tests.several_hosts import be_on_host

every_layout = pytest.mark.parametrize("layout", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
Layout = tuple[int, int]


def join(rank: int, layout: Layout) -> None:
    be_on_host(layout[rank])
    join_paddle(rank)


def wrapped(model: Any, **options: Any) -> DataParallel:
    return DataParallel(model, reduce_through="group", **options)


def gathers_of(step: Callable[[], object]) -> int:
    """Count a step's all-gathers over the group."""
    real, calls = dist.stream.all_gather, []

    def all_gather(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return real(*arguments, **options)

    dist.stream.all_gather = all_gather
    try:
        step()
    finally:
        dist.stream.all_gather = real
    return len(calls)


@ranks(2, group=None)
@every_layout
def test_ranks_of_one_host_gather_no_reports_over_the_group(rank: int, layout: Layout) -> None:
    join(rank, layout)
    model = wrapped(two_layers())
    x = share(batch(), rank)
    train(model, x)  # these steps also agree on the order of gradients, over the group
    assert gathers_of(lambda: train(model, x, steps=1)) == (0 if layout == (0, 0) else 1)


@ranks(1, group=None)
def test_a_single_rank_gathers_no_reports(rank: int) -> None:
    model = DataParallel(two_layers(), reduce_through="group", weight=lambda x: float(len(x)))
    x = paddle.to_tensor(batch())
    train(model, x)
    assert gathers_of(lambda: train(model, x)) == 0


@ranks(2, group=None)
@every_layout
def test_gradients_are_the_mean_and_infinities_are_named(rank: int, layout: Layout) -> None:
    join(rank, layout)
    alone = two_layers()
    squares(alone(paddle.to_tensor(batch()))).backward()
    model = wrapped(two_layers(), bucket_cap_mb=0.0001)
    for _ in range(2):
        model.clear_gradients()
        squares(model(share(batch(), rank))).backward()
        for ours, expected in zip(gradients(model), gradients(alone), strict=True):
            assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert model.nonfinite() == {}
    with pytest.warns(RuntimeWarning, match="infinity or a NaN on rank 1 of 2"):
        model(paddle.full([1, 4], float("nan") if rank else 1.0)).sum().backward()
    assert set(model.nonfinite()) == {1}


@ranks(2, group=None)
@every_layout
def test_errors_name_parameters(rank: int, layout: Layout) -> None:
    join(rank, layout)
    model = Branches()
    wrapper = wrapped(model)
    with pytest.raises(UnusedParameterError, match="got no gradient"):
        wrapper(paddle.ones([1, 3]), "left" if rank else "right").sum().backward()


@ranks(2, group=None)
@every_layout
def test_reports_of_several_models_show_a_different_order(rank: int, layout: Layout) -> None:
    join(rank, layout)
    models = [wrapped(two_layers()) for _ in range(2)]
    own = models if rank else models[::-1]
    with pytest.raises(MismatchError, match="averaged gradients of another model"):
        own[0](paddle.ones([1, 4])).sum().backward()


@ranks(2, group=None, dies={1: 7})
@every_layout
def test_a_rank_that_dies_is_named(rank: int, layout: Layout) -> None:
    join(rank, layout)
    model = wrapped(two_layers())
    x = share(batch(), rank)
    train(model, x)
    if rank:
        os._exit(7)
    with pytest.raises(PeerLostError, match="ank 1 of 2"):
        train(model, x)
