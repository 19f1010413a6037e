"""An error on one rank is reported on every rank, long before the deadline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paceline import Group
from paceline.errors import CollectiveError, ConfigError, PacelineError, RendezvousError
from paceline.reducer import model_agreement
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks

LONG_S = 300.0  # longer than the harness waits


def wrap_wrongly_on_rank_1(rank: int, world_size: int, *also: Any, **options: Any) -> None:
    """Make each wrong call on rank 1, `also` these; then a right one on all ranks, which must still work."""
    lazy = nn.Sequential(nn.LazyLinear(2))
    for wrong, words in (
        *also,
        ({"bucket_cap_mb": "big"}, "bucket_cap_mb='big'"),
        ({"device_ids": 0}, "device_ids=0"),
        ({"buffers": "average"}, "buffers='average'"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"module": None}, "module=None"),
        ({"module": lazy}, "uninitialized"),
    ):
        given = {"module": nn.Linear(2, 2), "timeout_s": LONG_S, **options, **(wrong if rank == 1 else {})}
        with pytest.raises(ConfigError) as caught:
            DistributedDataParallel(**given)
        assert words in str(caught.value)
        if rank != 1:
            assert f"Rank 1 of {world_size} could not wrap" in str(caught.value)
            assert caught.value.ranks == (1,)
    model = DistributedDataParallel(nn.Linear(2, 2), **options)
    model(torch.ones(1, 2)).sum().backward()


@kept_ranks(2, group="gloo")
def test_arguments_over_gloo(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    wrap_wrongly_on_rank_1(
        rank,
        2,
        ({"process_group": "gloo"}, "process_group='gloo'"),
        ({"device_mesh": "dp"}, "device_mesh='dp'"),
        ({"device_mesh": init_device_mesh("cpu", (2, 1))}, "Only 1D device mesh"),
        ({"process_group": dist.group.WORLD, "device_mesh": mesh}, "both process_group and device_mesh"),
    )


@kept_ranks(3, group="gloo")
def test_a_rank_outside_of_the_group_waits_for_no_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank in the group waits for its answer, which could otherwise reach the next call of all ranks."""
    monkeypatch.setattr(model_agreement, "_PATIENCE_S", LONG_S)
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(ConfigError, match="this rank is in no such group"):
            DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    else:
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        model(torch.ones(1, 2)).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3


@kept_ranks(3, group="gloo")
def test_a_mesh_on_one_rank_beside_the_group_of_all(rank: int) -> None:
    """The group is not the default one."""
    group, mesh = dist.new_group([1, 2]), init_device_mesh("cpu", (3,))
    if rank == 0:
        return
    given = {"process_group": group, "timeout_s": LONG_S} | ({"device_mesh": mesh} if rank == 2 else {})
    with pytest.raises(ConfigError, match="both process_group and device_mesh") as caught:
        DistributedDataParallel(nn.Linear(2, 2), **given)
    assert rank == 2 or "Rank 1 of 2 could not wrap" in str(caught.value)


@kept_ranks(3)
def test_arguments_over_a_group(group: Group) -> None:
    wrap_wrongly_on_rank_1(group.rank, 3, process_group=group)


@kept_ranks(2, group="gloo")
def test_arguments_that_are_wrong_on_all_ranks_are_reported_on_each(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"DistributedDataParallel: bucket_cap_mb='(big|huge)'"):
        DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=("big", "huge")[rank])


@kept_ranks(2, group="gloo")
def test_one_rank_alone_wraps(rank: int) -> None:
    dist.barrier()  # Gloo has connected rank 1 too before rank 0 leaves
    if rank == 1:
        with pytest.raises(PacelineError, match=r"lost another rank|gave up waiting for") as caught:
            DistributedDataParallel(nn.Linear(2, 2), timeout_s=0.5)
        assert caught.value.missing == (0,)
        assert "Rank 1 of 2" in caught.value.summary and "rank 0" in caught.value.seen
        assert caught.value.likely and "output" in caught.value.hint


@kept_ranks(2, group="gloo")
def test_a_hook_on_one_rank(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), timeout_s=4.0)
    if rank == 1:
        with pytest.raises(RendezvousError, match="not every rank has registered a hook"):
            model.register_comm_hook(None, lambda state, bucket: None)
        return
    with pytest.raises(CollectiveError, match="Rank 1"):
        model(torch.ones(1, 2)).sum().backward()
