"""Models, processes and ranks with which no mean can be made are refused, by name and on every rank."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError, DeadlineError, ForkedError, ModelMismatchError
from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import train, two_layers

PATHS = ["group", "memory"]


@ranks(1, group="gloo")
def test_one_rank_alone_may_ask_for_errors(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers(), nonfinite="raise")
    train(ddp, torch.ones(1, 4))
    with pytest.raises(Exception, match="infinity or a NaN on rank 0 of 1"):
        ddp(torch.full((1, 4), float("nan"))).sum().backward()


@ranks(3, group="gloo")
def test_different_models_are_refused_on_every_rank(rank: int) -> None:
    with pytest.raises(ModelMismatchError, match=r"'0.weight'(?s:.*)rank 1: 0.weight, shape \(6, 4\)"):
        DistributedDataParallel(two_layers(6 if rank == 1 else 5))
    swapped = [nn.Linear(2, 2), nn.LayerNorm(2)]
    with pytest.raises(ModelMismatchError, match="bucket_cap_mb differs"):
        DistributedDataParallel(two_layers(), bucket_cap_mb=1 + rank)
    model = two_layers()
    model[2].bias.requires_grad_(rank != 2)
    with pytest.raises(ModelMismatchError, match=r"'2.bias': requires_grad differs(?s:.*)rank 2: "):
        DistributedDataParallel(model)
    named = nn.ModuleDict({str(i): swapped[i] for i in ([0, 1] if rank else [1, 0])})
    with pytest.raises(ModelMismatchError, match="the order differs"):
        DistributedDataParallel(named)


@ranks(2, group="gloo")
def test_models_that_cannot_be_wrapped(rank: int) -> None:
    with pytest.raises(ConfigError, match="doesn't have any parameter"):
        DistributedDataParallel(two_layers().requires_grad_(False))
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        DistributedDataParallel(nn.Linear(2, 2).to(torch.float8_e4m3fn))
    from torch.distributed.tensor import distribute_module, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match="'weight' is a DTensor"):
        DistributedDataParallel(distribute_module(nn.Linear(2, 2), mesh["tp"]), device_mesh=mesh["dp"])


@ranks(2, group="gloo")
def test_a_model_converted_after_wrapping_is_noticed_at_the_gradient(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    ddp.double()
    with pytest.raises(ConfigError, match=r"dense gradient of torch\.float32"):
        ddp(torch.ones(1, 4, dtype=torch.float64)).sum().backward()


@ranks(2, group="gloo")
def test_a_forked_child_is_refused(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    child = os.fork()
    if child == 0:
        try:
            ddp(torch.ones(1, 4))
        except ForkedError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    train(ddp, torch.ones(1, 4))


@pytest.mark.parametrize("path", PATHS)
@ranks(2, group="gloo")
def test_a_late_rank_is_an_error_at_the_time_out(rank: int, path: str) -> None:
    ddp = DistributedDataParallel(two_layers(), reduce_through=path, timeout_s=3, warn_after_s=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a busy machine is late as well
        ddp(torch.ones(1, 4)).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has raised"])
        return
    with pytest.raises(DeadlineError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a rank that is late, before the time-out
        ddp(torch.ones(1, 4)).sum().backward()
    store.set("rank 0 has raised", "")
    assert "3.0 s" in str(caught.value)
    if path == "memory":
        assert caught.value.late == (1,)
        assert "after backward of pass 1" in str(caught.value)
