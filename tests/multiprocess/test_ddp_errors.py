"""Models whose gradients can't be averaged are refused on every rank, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError, ModelMismatchError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import train, two_layers

PATHS = ["group", "memory"]


@kept_ranks(1, group="gloo")
def test_one_rank_alone_may_ask_for_errors(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers(), nonfinite="raise")
    train(ddp, torch.ones(1, 4))
    with pytest.raises(Exception, match="infinity or a NaN on rank 0 of 1"):
        ddp(torch.full((1, 4), float("nan"))).sum().backward()


@kept_ranks(3, group="gloo")
def test_models_whose_parameters_come_in_another_order_are_refused(rank: int) -> None:
    swapped = [nn.Linear(2, 2), nn.LayerNorm(2)]
    named = nn.ModuleDict({str(i): swapped[i] for i in ([0, 1] if rank else [1, 0])})
    with pytest.raises(ModelMismatchError, match="the order differs"):
        DistributedDataParallel(named)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # torch 2.6 warns on a CPU
@kept_ranks(2, group="gloo")
def test_models_that_cannot_be_wrapped(rank: int) -> None:
    with pytest.raises(ConfigError, match="doesn't have any parameter"):
        DistributedDataParallel(two_layers().requires_grad_(False))
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        DistributedDataParallel(nn.Linear(2, 2).to(torch.float8_e4m3fn))
    from torch.distributed.tensor import distribute_module, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ConfigError, match="'weight' is a DTensor"):
        DistributedDataParallel(distribute_module(nn.Linear(2, 2), mesh["tp"]), device_mesh=mesh["dp"])


@kept_ranks(2, group="gloo")
def test_a_model_converted_after_wrapping_is_noticed_at_the_gradient(rank: int) -> None:
    ddp = DistributedDataParallel(two_layers())
    ddp.double()
    with pytest.raises(ConfigError, match=r"dense gradient of torch\.float32"):
        ddp(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
