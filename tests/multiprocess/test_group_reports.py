"""Reports of a pass over Gloo beside the process group, as where that is NCCL alone and serves no CPU."""

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
from paceline.torch import DistributedDataParallel
from paceline.torch.link import link, reports
from tests.harness import ranks
from tests.multiprocess.ddp_models import Branches, share, train, two_layers


def reporting_beside() -> None:
    """As where the group serves no CPU. In each rank, which is a process of this test alone."""
    link._find_reports = reports.group_for_reports


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("a report goes through the process group of the user")


def _made_briefly(make: Any, *arguments: Any, timeout: timedelta) -> Any:
    return make(*arguments, timeout=timedelta(seconds=1))


def wrapped(model: torch.nn.Module, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(model, reduce_through="group", **options)


@ranks(2, group="gloo")
def test_no_report_goes_through_the_users_group(rank: int) -> None:
    reporting_beside()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    alone = two_layers().double()
    for count in (1, 2):
        train(alone, x.double(), steps=count)
    model = two_layers()
    ddp = wrapped(model, bucket_cap_mb=0.0001)
    train(ddp, share(x, rank, 2), steps=1)  # then the order of gradients is agreed on, over the user's group
    dist.all_gather = refuse
    train(ddp, share(x, rank, 2), steps=2)
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    assert ddp.nonfinite() == {}
    with pytest.warns(RuntimeWarning, match="infinity or a NaN on rank 1 of 2"):
        ddp(torch.full((1, 4), float("nan") if rank else 1.0)).sum().backward()
    assert set(ddp.nonfinite()) == {1}


@ranks(2, group="gloo")
def test_errors_name_ranks_and_parameters(rank: int) -> None:
    reporting_beside()
    model = Branches()
    del model.never
    ddp = wrapped(model)
    with pytest.raises(UnusedParameterError, match="got no gradient"):
        ddp(torch.ones(1, 3), "left" if rank else "right").sum().backward()
    ddp(torch.ones(1, 3), "both").sum().backward()


@ranks(2, group="gloo")
def test_models_over_one_group_have_one_for_reports_which_tells_of_another_order(rank: int) -> None:
    reporting_beside()
    models = [wrapped(two_layers()) for _ in range(2)]
    (made,) = reports._groups.values()
    assert made is not None and made.size() == 2 and made.rank() == rank
    own = models if rank else models[::-1]
    with pytest.raises(MismatchError, match="averaged gradients of another model"):
        own[0](torch.ones(1, 4)).sum().backward()


@ranks(2, group="gloo")
def test_where_a_rank_cannot_connect_all_report_through_the_users_group(rank: int) -> None:
    reporting_beside()
    if rank:

        def cannot(*arguments: object, **options: object) -> None:
            raise RuntimeError("no route to host")

        dist.ProcessGroupGloo = cannot
    else:  # and does not wait for it for long
        made = dist.ProcessGroupGloo
        dist.ProcessGroupGloo = functools.partial(_made_briefly, made)
    model = two_layers()
    ddp = wrapped(model)
    assert list(reports._groups.values()) == [None]
    train(ddp, torch.ones(4, 4))
    assert ddp.gradient_path == "group"


@ranks(2, group="gloo", dies={1: 7})
def test_a_rank_that_dies_is_named(rank: int) -> None:
    reporting_beside()
    ddp = wrapped(two_layers())
    train(ddp, torch.ones(4, 4), steps=2)
    if rank:
        os._exit(7)
    with pytest.raises(PeerLostError, match="ank 1 of 2"):
        train(ddp, torch.ones(4, 4))
