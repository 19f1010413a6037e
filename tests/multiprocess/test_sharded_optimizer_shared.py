"""ShardedOptimizer on parameters that a host's ranks share: each rank writes its shard for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from paceline.errors import ConfigError
from paceline.sharding.shared_parameters import storage_of
from paceline.torch import DistributedDataParallel, ShardedOptimizer, share
from tests.harness import kept_ranks
from tests.multiprocess.test_sharded_optimizer import ELEMENTWISE, same_bits

PATHS = pytest.mark.parametrize("path", ["memory", "group"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 1))


def train(wrapped: nn.Module, optimizer: Any, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 9, generator=generator)).square().mean().backward()
        optimizer.step()


@PATHS
@kept_ranks(3, group="gloo")
def test_the_bits_are_those_of_replicas_with_the_whole_optimizer(rank: int, path: str) -> None:
    for optimizer_class, options in (
        (optim.AdamW, {"lr": 0.01}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.Adafactor, {}),
    ):
        replica = DistributedDataParallel(model())
        train(replica, optimizer_class(replica.parameters(), **options), rank, 6)
        for is_made_before in (False, True):
            shared = model()
            parameters = list(shared.parameters())

            def make(
                parameters: Any = parameters, cls: Any = optimizer_class, options: Any = options
            ) -> ShardedOptimizer:
                return ShardedOptimizer(parameters, cls, reduce_through=path, **options)

            optimizer = make() if is_made_before else None
            ddp = DistributedDataParallel(shared, share_parameters=True)
            optimizer = optimizer or make()
            train(ddp, optimizer, rank, 6)
            assert all(map(same_bits, parameters, replica.parameters())), optimizer_class
            # No rank has its own copy: all ranks see what one writes.
            dist.barrier()
            with ddp.writing(), torch.no_grad():
                if rank == 1:
                    parameters[0].fill_(7)
            assert parameters[0].eq(7).all()


def takes_groups_later(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether added groups work: in torch 2.9, Adagrad's own step raises KeyError with them."""
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = optimizer_class([first])
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.ones(1), torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@kept_ranks(2)
def test_each_elementwise_optimizer_has_the_bits_of_the_whole_one_after_40_steps(group: Any) -> None:
    """On each rank's own parameters, and on shared ones."""
    first_of_each = dict(reversed(ELEMENTWISE))
    assert len(first_of_each) == 12
    if not takes_groups_later(torch.optim.Adagrad):
        del first_of_each[torch.optim.Adagrad]
    for optimizer_class, options in first_of_each.items():
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in ((37, 41), (300,))]
        whole, own, shared = ([nn.Parameter(value.clone()) for value in values] for _ in range(3))
        ddp = DistributedDataParallel(nn.ParameterList(shared), process_group=group, share_parameters=True)
        assert all(map(storage_of, ddp.parameters())) and not any(map(storage_of, own))
        optimizer = optimizer_class(whole, **options)
        sharded = ShardedOptimizer(own, optimizer_class, process_group=group, **options)
        sharded.add_param_group({"params": shared})  # dealt separately: one parameter of each kind is cut
        cut = {piece.parameter for piece in sharded._shards.pieces if not piece.is_whole}
        assert cut == {0, 2}
        gradients = [
            [torch.randn(value.shape, generator=generator) * 10.0 ** (step % 4 - 2) for value in values]
            for step in range(8)
        ]
        for step in range(40):
            for parameters in (whole, own, shared):
                for parameter, gradient in zip(parameters, gradients[step % 8], strict=True):
                    parameter.grad = gradient
            optimizer.step()
            sharded.step()
        assert not any(map(same_bits, whole, values)), optimizer_class
        assert all(map(same_bits, own, whole)), optimizer_class
        assert all(map(same_bits, shared, whole)), optimizer_class


@kept_ranks(2, group="gloo")
def test_a_step_within_writing_or_of_some_ranks_is_refused(rank: int) -> None:
    ddp = DistributedDataParallel(model(), share_parameters=True)
    optimizer = ShardedOptimizer(ddp.parameters(), optim.SGD, lr=0.1)
    ddp(torch.ones(1, 9)).sum().backward()
    with ddp.writing(), pytest.raises(ConfigError, match=r"within writing\(\)"):
        optimizer.step()
    before = [parameter.detach().clone() for parameter in ddp.parameters()]
    optimizer.step()
    assert not any(map(same_bits, ddp.parameters(), before))
    alone = [dist.new_group([each]) for each in range(2)][rank]
    with pytest.raises(ConfigError, match="some ranks that share its parameters take no part"):
        ShardedOptimizer(ddp.parameters(), optim.SGD, process_group=alone, lr=0.1)


@kept_ranks(2, group="gloo")
def test_a_model_that_is_shared_to_read_is_refused(rank: int) -> None:
    read = share(copy.deepcopy(model()))
    with pytest.raises(ConfigError, match="share to read"):
        ShardedOptimizer(read.parameters(), optim.SGD, lr=0.1)
