"""Arguments of torch's class in paceline.paddle.DataParallel that change what backward does."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from paddle import nn

from paceline.errors import ConfigError, ModelMismatchError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import (
    Branches,
    batch,
    join_paddle,
    joined_ranks,
    kept_ranks,
    share,
    squares,
    two_layers,
)


@kept_ranks(2)
def test_a_static_graph_may_differ_from_rank_to_rank(group: Any) -> None:
    model = Branches()
    wrapped = DataParallel(model, group=group, static_graph=True)
    for _ in range(3):
        wrapped.clear_gradients()
        wrapped(paddle.ones([1, 3]), "right" if group.rank else "left").sum().backward()
        for layer in (model.left, model.right):
            assert_array_equal(layer.weight.grad.numpy(), np.full((3, 2), 0.5))
    assert wrapped.static_graph
    with pytest.raises(ModelMismatchError, match="static_graph differ"):
        DataParallel(Branches(), group=group, static_graph=group.rank == 0)


class Twice(nn.Layer):
    """Backward runs `late` in two separate parts of the graph, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(1)
        self.late, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: paddle.Tensor, times: int) -> paddle.Tensor:
        for _ in range(times):
            x = dist.fleet.utils.recompute(self.late, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("view", [False, True])
@kept_ranks(2)
def test_delayed_parameters_wait_for_the_end(group: Any, view: bool) -> None:
    model, alone = Twice(), Twice()
    wrapped = DataParallel(
        model,
        group=group,
        delay_all_reduce_named_params=((f"late.{name}", p) for name, p in model.late.named_parameters()),
        param_to_hook_all_reduce=model.head.weight,
        gradient_as_bucket_view=view,
    )
    # Once in the first backwards, so that only the argument announces that it runs twice later.
    for times in (1, 1, 2, 0, 2):
        x = batch(seed=times)
        wrapped.clear_gradients()
        alone.clear_gradients()
        own, whole = share(x, group.rank), paddle.to_tensor(x)
        own.stop_gradient = whole.stop_gradient = False
        squares(wrapped(own, times)).backward()
        squares(alone(whole, times)).backward()
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            zeros = np.zeros(expected.shape)  # for a parameter without a gradient, as in torch
            assert_allclose(
                ours.grad.numpy(),
                zeros if expected.grad is None else expected.grad.numpy(),
                rtol=1e-5,
                atol=1e-6,
            )
    wrapped.init_reducer()  # reads the same arguments again
    assert wrapped._tensors.delayed == {0, 1}


@kept_ranks(2)
def test_wrong_delayed_parameters_and_meshes_are_refused(group: Any) -> None:
    model = two_layers()
    named = list(model.named_parameters())
    unknown_peer = paddle.create_parameter([1], "float32")
    for options, message in (
        ({"delay_all_reduce_named_params": named[:1]}, "set at the same time"),
        (
            {"delay_all_reduce_named_params": [("x", unknown_peer)], "param_to_hook_all_reduce": named[0][1]},
            "params: x",
        ),
        (
            {"delay_all_reduce_named_params": named[:1], "param_to_hook_all_reduce": unknown_peer},
            r"param_to_hook_all_reduce=(?s:.*)a parameter of the model that is trained",
        ),
        ({"bucket_cap_mb_list": [1, 0]}, "bucket_cap_mb_list"),
        ({"device_mesh": "dp"}, "a ProcessMesh of one dimension"),
        ({"warn_after_s": -1}, "warn_after_s"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataParallel(model, **options)
    with pytest.raises(ConfigError, match="both name the ranks"):
        DataParallel(model, group=group, device_mesh=dist.ProcessMesh([0, 1], dim_names=["dp"]))
    with pytest.raises(ConfigError, match=r"needs paddle\.distributed"):
        DataParallel(model, device_mesh=dist.ProcessMesh([0, 1], dim_names=["dp"]))


@joined_ranks(2)
def test_the_ranks_of_a_mesh(rank: int) -> None:
    join_paddle(rank)
    model = nn.Linear(4, 1)
    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    if not hasattr(mesh, "get_group"):  # Paddle before 3.1
        with pytest.raises(ConfigError, match="does not say the group of a device_mesh"):
            DataParallel(model, device_mesh=mesh)
        return
    wrapped = DataParallel(model, device_mesh=mesh)
    wrapped(paddle.full([1, 4], 1.0 + rank)).sum().backward()
    assert_array_equal(model.weight.grad.numpy(), np.full((4, 1), 1.5))
    with pytest.raises(ConfigError, match="one dimension"):
        DataParallel(model, device_mesh=dist.ProcessMesh([[0], [1]], dim_names=["dp", "mp"]))


@pytest.mark.parametrize("init_sync_buffers", [None, False])
@kept_ranks(2)
def test_buffers_are_broadcast_when_wrapping_or_not(group: Any, init_sync_buffers: bool | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1D(3))
    model[1]._mean.set_value(paddle.full([3], float(group.rank)))
    DataParallel(model, group=group, init_sync_buffers=init_sync_buffers)
    expected = 0 if init_sync_buffers is None else group.rank
    assert_array_equal(model[1]._mean.numpy(), np.full(3, expected))
