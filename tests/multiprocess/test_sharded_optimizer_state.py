"""A ShardedOptimizer's state equals the whole optimizer's, and loads in both directions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn, optim

from paceline.errors import ConfigError
from paceline.torch import ShardedOptimizer
from tests.harness import kept_ranks
from tests.multiprocess.test_sharded_optimizer import (
    in_two_groups,
    make_parameters,
    same_bits,
    train,
)

PATHS = pytest.mark.parametrize("path", ["memory", "group"])


class Nested(optim.Optimizer):
    """Keeps state in a dict and a list, as preconditioned optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "count": 0,
                        "factors": {0: torch.zeros(3)},
                        "kept": [torch.zeros_like(p), "text"],
                    }
                state["count"] += 1
                state["factors"][0] += p.grad.sum()
                state["kept"][0] += p.grad
                p.sub_(state["kept"][0], alpha=group["lr"])


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and same_bits(one, other), where
        assert one.stride() == other.stride(), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{where}.{place}")
    else:
        assert one == other, where


def sorted_state(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": dict(sorted(state["state"].items()))}


def same_parameters(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(map(same_bits, one, other))


@PATHS
@kept_ranks(3, group="gloo")
def test_a_state_equals_the_whole_optimizers_and_loads_in_both_directions(rank: int, path: str) -> None:
    for optimizer_class, options in (
        (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.Adagrad, {}),  # makes its state in the constructor
        (Nested, {}),
    ):
        expected, parameters = make_parameters(), make_parameters()
        whole = optimizer_class(in_two_groups(expected), **options)
        ours = ShardedOptimizer(in_two_groups(parameters), optimizer_class, reduce_through=path, **options)
        train(whole, expected, 5)
        train(ours, parameters, 5)
        for to in (0, 2):
            with pytest.raises(ConfigError, match=f"not been consolidated on rank {rank}"):
                ours.state_dict()
            ours.consolidate_state_dict(to=to)
            if rank == to:
                assert_same(ours.state_dict(), sorted_state(whole.state_dict()))
                file = io.BytesIO()
                torch.save(ours.state_dict(), file)
                loaded = torch.load(io.BytesIO(file.getvalue()))
                assert_same(loaded, ours.state_dict())
                ours._steps.begin_anew()
        # Load the whole state into a sharded optimizer with other values, and continue; and the reverse.
        copies = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in expected]
        resumed = ShardedOptimizer(in_two_groups(copies), optimizer_class, reduce_through=path, lr=3.0)
        resumed.load_state_dict(whole.state_dict())
        train(resumed, copies, 4)
        train(whole, expected, 4)
        assert same_parameters(copies, expected)
        resumed.consolidate_state_dict(to=1)
        if rank == 1:
            last = [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in expected]
            other = optimizer_class(in_two_groups(last), lr=3.0)
            other.load_state_dict(resumed.state_dict())
            train(other, last, 4)
            train(whole, expected, 4)
            assert same_parameters(last, expected)


@kept_ranks(2, group="gloo")
def test_a_loaded_state_is_copied(rank: int) -> None:
    parameter = nn.Parameter(torch.ones(1000))
    whole = optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.ones(1000)
    whole.step()
    saved = whole.state_dict()
    before = saved["state"][0]["exp_avg"].clone()
    ours = ShardedOptimizer([parameter], optim.Adam, lr=0.1)
    ours.load_state_dict(saved)
    ours.step()
    assert same_bits(saved["state"][0]["exp_avg"], before)
    assert sum(tensor.numel() for tensor in ours.optim.state[ours._shards.tensors[rank]].values()) < 1100


@kept_ranks(2, group="gloo")
def test_what_cannot_be_saved_or_loaded(rank: int) -> None:
    class Opaque(Nested):
        def step(self, closure: Any = None) -> None:
            super().step()
            for state in self.state.values():
                state["kept"] = object()

    parameters = make_parameters()
    ours = ShardedOptimizer(parameters, Opaque)
    for tensor in parameters:
        tensor.grad = torch.ones_like(tensor)
    ours.step()
    with pytest.raises(ConfigError, match="an object of the class object"):
        ours.consolidate_state_dict()
    with pytest.raises(ConfigError, match="to=2"):
        ours.consolidate_state_dict(to=2)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ours.load_state_dict(optim.SGD(in_two_groups(make_parameters())).state_dict())
    with pytest.raises(ConfigError, match="cannot be pickled"):
        torch.save(ours, io.BytesIO())
