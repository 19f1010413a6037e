"""An error on one rank is reported on every rank, with Paddle."""

from __future__ import annotations

import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

import paceline.paddle
from paceline import Group
from paceline.errors import ConfigError
from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import join_paddle, joined_ranks, kept_ranks


@kept_ranks(2)
def test_arguments_over_a_group(group: Group) -> None:
    for wrong, words in (
        ({"bucket_cap_mb": "big"}, "bucket_cap_mb='big'"),
        ({"buffers": "average"}, "buffers='average'"),
        ({"layers": None}, "layers=None"),
        ({"warn_after_s": -1}, "warn_after_s=-1"),
        ({"bucket_cap_mb_list": [0]}, "bucket_cap_mb_list=[0]"),
        ({"skip_all_reduce_unused_params": "no"}, "skip_all_reduce_unused_params='no'"),
        ({"delay_all_reduce_named_params": 7}, "delay_all_reduce_named_params=7"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16'"),
        ({"device_mesh": "dp"}, "both name the ranks"),
    ):
        given = {"layers": nn.Linear(2, 2), "group": group, "timeout_s": 300.0}
        with pytest.raises(ConfigError) as caught:
            DataParallel(**given | (wrong if group.rank == 1 else {}))
        assert words in str(caught.value)
        if group.rank == 0:
            assert "Rank 1 of 2 could not wrap" in str(caught.value)
    model = DataParallel(nn.Linear(2, 2), group=group)
    model(paddle.ones([1, 2])).sum().backward()


@pytest.mark.parametrize("wrong_on", [{0, 1}, {1}])
@kept_ranks(2)
def test_paddle_that_copies_instead_of_making_views(group: Group, wrong_on: set[int]) -> None:
    if group.rank in wrong_on:
        paddle.set_flags({"FLAGS_use_stride_kernel": False})
    for wrap, owner in ((DataParallel, "DataParallel"), (paceline.paddle.share, "share")):
        with pytest.raises(ConfigError, match="FLAGS_use_stride_kernel") as caught:
            wrap(nn.Linear(2, 2), group=group, timeout_s=300.0)
        first = f"{owner}: Paddle was told" if group.rank in wrong_on else "Rank 1 of 2 could not"
        assert str(caught.value).startswith(first)
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    DataParallel(nn.Linear(2, 2), group=group)(paddle.ones([1, 2])).sum().backward()


@pytest.mark.skipif(
    paddle.__version__ < "3.2",
    reason="Paddle 3.1 makes a group on all ranks whenever a mesh is asked for its own",
)
@joined_ranks(2)
def test_other_wrong_arguments_beside_a_mesh_are_reported_on_every_rank(rank: int) -> None:
    join_paddle(rank)
    mesh = dist.ProcessMesh([0, 1], dim_names=["dp"])
    frozen = nn.Linear(2, 2)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    for wrong, words in (
        ({"init_sync_buffers": "yes"}, "init_sync_buffers='yes'"),
        ({"group": "gloo"}, "group='gloo'"),
        ({"group": dist.get_group()}, "both name the ranks"),
        ({"layers": frozen}, "does not have any parameters to train"),
    ):
        given = {"layers": nn.Linear(2, 2), "device_mesh": mesh, "timeout_s": 300.0}
        with pytest.raises(ConfigError) as caught:
            DataParallel(**given | (wrong if rank == 1 else {}))
        assert words in str(caught.value)
    model = DataParallel(nn.Linear(2, 2), device_mesh=mesh)
    model(paddle.ones([1, 2])).sum().backward()
