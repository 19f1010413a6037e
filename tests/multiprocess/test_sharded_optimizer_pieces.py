"""Shards of large parameters are updated in pieces that fit into caches, with the same bits and state.

The parameters here are small, and the assumed cache is smaller still.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel, ShardedOptimizer
from paceline.torch.sharding import sharded_optimizer
from tests.harness import kept_ranks
from tests.multiprocess.test_sharded_optimizer import (
    ELEMENTWISE,
    in_two_groups,
    make_parameters,
    same_bits,
    train,
)
from tests.multiprocess.test_sharded_optimizer_state import assert_same

CACHED_BYTES = 1024


def make(parameters: Any, optimizer_class: Any, *args: Any, **options: Any) -> ShardedOptimizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_optimizer, "CACHED_BYTES", CACHED_BYTES)
        return ShardedOptimizer(parameters, optimizer_class, *args, **options)


def pieces_of_parameter(ours: ShardedOptimizer, index: int) -> int:
    return sum(piece.parameter == index for piece in ours._shards.pieces)


def is_cut_for_caches(options: dict[str, Any]) -> bool:
    return not options.get("fused") and not options.get("foreach")


@kept_ranks(2)
def test_each_elementwise_optimizer_has_the_bits_of_the_whole_one(group: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        chosen = ELEMENTWISE if dtype is torch.float32 else [(optim.AdamW, {}), (optim.SGD, {"lr": 0.1})]
        for optimizer_class, options in chosen:
            expected, parameters = make_parameters(dtype), make_parameters(dtype)
            train(optimizer_class(expected, **options), expected, 12)
            ours = make(parameters, optimizer_class, group, **options)
            train(ours, parameters, 12)
            assert all(map(same_bits, parameters, expected)), (dtype, optimizer_class, options)
            # Parameter 0 has 1517 elements and parameter 7 1537; the cut between the ranks is in one of them.
            found = pieces_of_parameter(ours, 0) + pieces_of_parameter(ours, 7)
            assert (found > 4) == is_cut_for_caches(options), (dtype, options)
            assert pieces_of_parameter(ours, 6) == 1, "with gaps"
            own = sum(len(each["params"]) for each in ours.optim.param_groups)
            assert own == len(ours._shards.own)


@pytest.mark.parametrize("path", ["memory", "group"])
@kept_ranks(2, group="gloo")
def test_a_state_equals_the_whole_optimizers_and_loads_in_both_directions(rank: int, path: str) -> None:
    expected, parameters = make_parameters(), make_parameters()
    whole = optim.AdamW(in_two_groups(expected), lr=0.01, amsgrad=True)
    ours = make(in_two_groups(parameters), optim.AdamW, reduce_through=path, lr=0.01, amsgrad=True)
    schedulers = [optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (whole, ours)]
    for optimizer, trained, scheduler in zip((whole, ours), (expected, parameters), schedulers):
        train(optimizer, trained, 5, lambda _, scheduler=scheduler: scheduler.step())
    ours.consolidate_state_dict(to=0)
    if rank == 0:
        state = ours.state_dict()
        assert_same(state["state"], dict(sorted(whole.state_dict()["state"].items())))
        assert_same(state["param_groups"], whole.state_dict()["param_groups"])
    copies = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in expected]
    resumed = make(in_two_groups(copies), optim.AdamW, reduce_through=path, lr=3.0)
    resumed.load_state_dict(whole.state_dict())
    train(resumed, copies, 4)
    train(whole, expected, 4)
    assert all(map(same_bits, copies, expected))


@kept_ranks(2, group="gloo")
def test_pieces_of_shared_parameters_and_scattered_gradients(rank: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 150), nn.ReLU(), nn.Linear(150, 21))

    results = []
    for how in ("replicas", "mean", "scatter"):
        module = model()
        options = {} if how == "replicas" else {"share_parameters": True, "reduce": how}
        ddp = DistributedDataParallel(module, **options)
        is_whole = how == "replicas"
        optimizer = (optim.AdamW if is_whole else lambda p: make(p, optim.AdamW))(list(module.parameters()))
        for step in range(8):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(8 * step + rank)
            ddp(torch.randn(4, 9, generator=generator)).square().mean().backward()
            ddp.clip_grad_norm_(0.1)
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in module.parameters()])
        if not is_whole:
            assert len(optimizer._shards.pieces) > 8
    for result in results[1:]:
        assert all(map(same_bits, result, results[0]))


@kept_ranks(2, group="gloo")
def test_added_groups_and_other_memory(rank: int) -> None:
    expected, parameters = make_parameters(), make_parameters()
    whole, ours = optim.AdamW(expected[:4]), make(parameters[:4], optim.AdamW)
    for optimizer, trained in ((whole, expected), (ours, parameters)):
        train(optimizer, trained, 3)
        optimizer.add_param_group({"params": trained[4:], "lr": 0.1})
        train(optimizer, trained, 3)
        trained[7].data = trained[7].data.clone()
        train(optimizer, trained, 3)
    assert pieces_of_parameter(ours, 7) > 2
    assert all(map(same_bits, parameters, expected))


@kept_ranks(2, group="gloo")
def test_a_rank_without_data_updates_its_pieces(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(40, 40)
    copy = nn.Linear(40, 40)
    copy.load_state_dict(module.state_dict())
    optimizer, whole = make(module.parameters(), optim.AdamW), optim.AdamW(copy.parameters())
    ddp = DistributedDataParallel(module)
    with Join([ddp, optimizer]):
        for step in range(4 if rank == 0 else 2):
            optimizer.zero_grad()
            ddp(torch.full((2, 40), 1.0 + step)).sum().backward()
            optimizer.step()
    assert len(optimizer._shards.pieces) > 4
    for step in range(4):  # torch's wrapper and Paceline's divide by all ranks, also by those without data
        whole.zero_grad()
        weight = 1.0 if step < 2 else 0.5
        (weight * copy(torch.full((2, 40), 1.0 + step)).sum()).backward()
        whole.step()
    assert_close(list(module.parameters()), list(copy.parameters()))


@kept_ranks(2, group="gloo")
def test_all_ranks_use_the_same_pieces_with_other_numbers_of_threads(rank: int) -> None:
    torch.set_num_threads(1 + rank)
    expected, parameters = make_parameters(), make_parameters()
    whole, ours = optim.AdamW(expected), make(parameters, optim.AdamW)
    train(whole, expected, 3)
    train(ours, parameters, 3)
    assert all(map(same_bits, parameters, expected))
    sizes = [piece.end - piece.begin for piece in ours._shards.pieces]
    assert max(sizes) * 4 > 1.1 * CACHED_BYTES, "for two threads"
    ours.consolidate_state_dict(to=0)


@kept_ranks(1, group="gloo")
def test_alone(rank: int) -> None:
    expected, parameters = make_parameters(), make_parameters()
    whole, ours = optim.AdamW(expected), make(parameters, optim.AdamW)
    train(whole, expected, 4)
    train(ours, parameters, 4)
    assert pieces_of_parameter(ours, 7) > 4
    assert all(map(same_bits, parameters, expected))
    assert_same(ours.state_dict()["state"], whole.state_dict()["state"])
