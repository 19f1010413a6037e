"""Status reports of a backward over a process group: in shared memory, over it, or over extra Gloo."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from paceline.errors import MismatchError, PeerLostError, UnusedParameterError
from paceline.reducer import host_reports
from paceline.reducer.host_reports import GroupReports, HostReports
from paceline.torch import DistributedDataParallel
from paceline.torch.communicator.find_peers import ProcessGroupPeers
from tests.harness import kept_ranks, ranks
from tests.multiprocess.ddp_models import Branches, share, train, two_layers

VARIANTS = ("in memory", "over the group", "beside it")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def use_reports(variant: str) -> bool:
    """Makes all models of this process exchange their reports in one of the variants.

    "in memory": ranks share a host. "over the group": they do not. "beside it": nor does the user's process
    group support the CPU. Returns whether there is an extra group beside the user's.
    """
    group = dist.group.WORLD
    peers = ProcessGroupPeers(group, None, None)
    beside = peers._reports_over_gloo() if variant == "beside it" else None
    if variant != "in memory":
        host_reports._reports[group] = beside or GroupReports(peers.calls.begin_gather)
    return beside is not None


def reports_of_models() -> Any:
    """Returns the exchange of reports that all models of this process share."""
    (found,) = host_reports._reports.values()
    return found


def _made_with_short_timeout(make: Any, *arguments: Any, timeout: timedelta) -> Any:
    return make(*arguments, timeout=timedelta(seconds=1))


def wrapped(model: torch.nn.Module, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(model, reduce_through="group", **options)


def collectives_of(step: Any) -> list[str]:
    """Returns the collectives of Gloo that a step runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sorted({event.name for event in profile.events() if event.name.startswith("gloo:")})


@kept_ranks("world_size", group="gloo")
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_of_one_host_make_no_collective_for_reports(rank: int, world_size: int) -> None:
    """Reports go through shared memory; a single rank exchanges none."""
    ddp = wrapped(two_layers())
    ddp._sync_to_weigh()  # so that a single rank averages, too
    train(ddp, torch.ones(4, 4), steps=2)  # ranks agree on the order of gradients over the group
    assert collectives_of(lambda: train(ddp, torch.ones(4, 4))) == ["gloo:all_reduce"]


@kept_ranks(2, group="gloo")
@every_variant
def test_gradients_are_the_mean_and_infinities_are_named(rank: int, variant: str) -> None:
    assert use_reports(variant) == (variant == "beside it")
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    alone = two_layers().double()
    for count in (1, 2):
        train(alone, x.double(), steps=count)
    model = two_layers()
    ddp = wrapped(model, bucket_cap_mb=0.0001)
    train(ddp, share(x, rank, 2), steps=1)
    train(ddp, share(x, rank, 2), steps=2)
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    assert ddp.nonfinite() == {}
    with pytest.warns(RuntimeWarning, match="infinity or a NaN on rank 1 of 2"):
        ddp(torch.full((1, 4), float("nan") if rank else 1.0)).sum().backward()
    assert set(ddp.nonfinite()) == {1}


@kept_ranks(2, group="gloo")
@every_variant
def test_errors_name_ranks_and_parameters(rank: int, variant: str) -> None:
    assert use_reports(variant) == (variant == "beside it")
    model = Branches()
    del model.never
    ddp = wrapped(model)
    with pytest.raises(UnusedParameterError, match="got no gradient"):
        ddp(torch.ones(1, 3), "left" if rank else "right").sum().backward()
    ddp(torch.ones(1, 3), "both").sum().backward()


@ranks(2, group="gloo")
@every_variant
def test_reports_detect_different_orders_of_models(rank: int, variant: str) -> None:
    assert use_reports(variant) == (variant == "beside it")
    models = [wrapped(two_layers()) for _ in range(2)]
    assert isinstance(reports_of_models(), HostReports if variant == "in memory" else GroupReports)
    own = models if rank else models[::-1]
    with pytest.raises(MismatchError, match="averaged gradients of another model"):
        own[0](torch.ones(1, 4)).sum().backward()


@ranks(2, group="gloo")
def test_all_report_through_the_users_group_if_one_rank_cannot_connect(rank: int) -> None:
    if rank:

        def cannot(*arguments: object, **options: object) -> None:
            raise RuntimeError("no route to host")

        dist.ProcessGroupGloo = cannot
    else:  # with a short wait for rank 1
        dist.ProcessGroupGloo = functools.partial(_made_with_short_timeout, dist.ProcessGroupGloo)
    assert not use_reports("beside it")
    ddp = wrapped(two_layers())
    train(ddp, torch.ones(4, 4))
    assert ddp.gradient_path == "group"


@ranks(2, group="gloo", dies={1: 7})
@every_variant
def test_a_rank_that_dies_is_named(rank: int, variant: str) -> None:
    assert use_reports(variant) == (variant == "beside it")
    ddp = wrapped(two_layers())
    train(ddp, torch.ones(4, 4), steps=2)
    if rank:
        os._exit(7)
    with pytest.raises(PeerLostError, match="ank 1 of 2"):
        train(ddp, torch.ones(4, 4))
