"""Buffers are synchronised after each synchronised backward, as `buffers` says, or on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel
from tests.harness import kept_ranks
from tests.multiprocess.ddp_models import bits, mixed, train

PATHS = ["group", "memory"]


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_are_those_of_rank_0_after_each_backward(rank: int, path: str) -> None:
    x = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(rank))
    synced = mixed()
    train(DistributedDataParallel(synced, reduce_through=path), x)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, bits(synced))
    assert gathered[0] == gathered[1]
    apart = mixed()
    train(DistributedDataParallel(apart, reduce_through=path, forward_sync_buffers=False), x)
    dist.all_gather_object(gathered, apart.norm.running_mean.tolist())
    assert gathered[0] != gathered[1]


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_of_all_kinds(rank: int, path: str) -> None:
    """Small, large, empty, non-contiguous and integer buffers, all of which forward replaces."""

    def kinds(seed: int) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(seed)
        return {
            "small": torch.randn(3, generator=source),
            "large": torch.randn(70_000, generator=source),
            "none": torch.empty(0),
            "columns": torch.randn(4, 6, generator=source)[:, ::2],
            "transposed": torch.randn(2, 5, generator=source).t(),
            "count": torch.randint(1000, (), generator=source),
            "flags": torch.rand(9, generator=source) > 0.5,
        }

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            for name, value in kinds(99).items():
                self.linear.register_buffer(name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name, value in kinds(rank).items():
                setattr(self.linear, name, value)
            return self.linear(x)

    model = Buffered()
    DistributedDataParallel(model, reduce_through=path)(torch.ones(1, 2)).sum().backward()
    for name, expected in kinds(0).items():
        assert torch.equal(getattr(model.linear, name), expected), name


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_are_averaged_broadcast_or_left_alone_by_name(rank: int, path: str) -> None:
    model = mixed()
    model.register_buffer("seen", torch.zeros(2, dtype=torch.float64))
    model.register_buffer("low", torch.zeros(2, dtype=torch.bfloat16))
    policies = {"norm.*_mean": "average", "norm.*": "local", "seen": "average", "l?w": "average"}
    ddp = DistributedDataParallel(model, reduce_through=path, buffers=policies)
    assert ddp.will_sync_module_buffers()

    def fill() -> None:
        model.norm.running_mean.data.fill_(2.0 + 2 * rank)
        model.norm.running_var.data.fill_(1.0 + rank)
        model.seen.fill_(rank)
        model.low.fill_(rank)

    def check() -> None:
        assert_close(model.norm.running_mean, torch.full((3,), 3.0))
        assert_close(model.norm.running_var, torch.full((3,), 1.0 + rank))
        assert_close(model.seen, torch.full((2,), 0.5, dtype=torch.float64))
        assert_close(model.low, torch.full((2,), 0.5, dtype=torch.bfloat16))

    model.norm.eval()  # so that forward leaves its statistics alone
    out = ddp(torch.ones(2, 1, 4, 4)).sum()
    fill()
    out.backward()
    check()
    fill()
    ddp.sync_buffers()
    check()


@pytest.mark.parametrize("path", PATHS)
@kept_ranks(2, group="gloo")
def test_buffers_on_demand_only(rank: int, path: str) -> None:
    model = mixed()
    ddp = DistributedDataParallel(model, reduce_through=path, broadcast_buffers=False)
    assert not ddp.will_sync_module_buffers()
    ddp(torch.full((2, 1, 4, 4), float(rank))).sum().backward()
    with torch.no_grad():
        model.norm.running_mean.fill_(float(rank))
    ddp.sync_buffers()
    assert not model.norm.running_mean.any()
    with pytest.raises(ConfigError, match="for each name pattern"):
        DistributedDataParallel(mixed(), buffers={"*": "mean"})
