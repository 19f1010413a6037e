"""torch's ShardedOptimizer(journal=True): its bits, added and refused parameter groups, and unsupported uses.

tests/fault/test_lost_steps.py kills ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from paceline.errors import ConfigError, ModelMismatchError, PeerLostError
from paceline.sharding import journal_layout
from paceline.torch import DistributedDataParallel, ShardedOptimizer
from tests.harness import kept_ranks
from tests.multiprocess.test_sharded_optimizer import ELEMENTWISE, same_bits
from tests.several_hosts import be_on_host

SHAPES = ((37, 41), (300,), (1,), (700,))


def parameters_of(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def share(group: Any, *lists: list[nn.Parameter]) -> DistributedDataParallel:
    held = nn.ParameterList([parameter for each in lists for parameter in each])
    return DistributedDataParallel(held, process_group=group, share_parameters=True)


def give(number: int, *lists: list[nn.Parameter]) -> None:
    """Set the same gradients in each list."""
    generator = torch.Generator().manual_seed(1 + number)
    for several in zip(*lists, strict=True):
        gradient = torch.randn(several[0].shape, generator=generator)
        for parameter in several:
            parameter.grad = gradient.clone()


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert one["state"][index].keys() == state.keys()
        assert all(same_bits(one["state"][index][key], value) for key, value in state.items())


@kept_ranks(2)
def test_bits_and_state_are_those_of_the_whole_optimizer(group: Any) -> None:
    journal_layout.BLOCK_BYTES = 1024
    for optimizer_class, options in ELEMENTWISE:
        shared, alone = parameters_of(), parameters_of()
        ddp = share(group, shared)
        optimizer = ShardedOptimizer(
            ddp.parameters(), optimizer_class, process_group=group, journal=True, **options
        )
        reference = optimizer_class(alone, **options)
        for step in range(5):
            give(step, shared, alone)
            optimizer.step()
            reference.step()
            optimizer.consolidate_state_dict()
            if group.rank == 0:
                assert_same_state(optimizer.state_dict(), reference.state_dict())
        assert all(map(same_bits, shared, alone)), optimizer_class


class Choosy(optim.AdamW):
    """An element's update depends on other elements if `sums` is set."""

    def __init__(self, params: Any, sums: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.defaults["sums"] = sums
        for group in self.param_groups:
            group.setdefault("sums", sums)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["sums"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad = parameter.grad / (1 + parameter.grad.square().sum())
        super().step()


@pytest.mark.parametrize("journal", [True, False])
@kept_ranks(2)
def test_a_group_that_is_refused_leaves_nothing_behind(group: Any, journal: bool) -> None:
    """It is refused for its options or its parameters' memory, on all ranks or on one. Training goes on."""
    journal_layout.BLOCK_BYTES = 1024
    shared, more, alone, alone_more = (parameters_of(seed) for seed in (0, 1, 0, 1))
    foreign = parameters_of(2)
    ddp = share(group, shared, more)
    optimizer = ShardedOptimizer(shared, Choosy, process_group=group, journal=journal, lr=0.01)
    reference = optim.AdamW(alone, lr=0.01)
    give(0, shared, alone)
    optimizer.step()
    reference.step()

    def refused(kind: type[Exception], words: str, added: dict[str, Any]) -> None:
        with pytest.raises(kind, match=words):
            optimizer.add_param_group(added)
        assert len(optimizer.param_groups) == len(optimizer._template.param_groups) == 1
        assert len(optimizer.optim.param_groups) == 1
        assert len(optimizer._shards.parameters) == len(SHAPES)

    if journal:
        refused(ConfigError, "gets whole parameters", {"params": more, "sums": True})
        refused(ConfigError, "share_parameters=True", {"params": foreign})
    refused(ModelMismatchError, "lr of group 1", {"params": more, "lr": 0.1 * (1 + group.rank)})
    refused(ConfigError, "more than one parameter group", {"params": [more[0], shared[0]]})
    with ddp.writing():
        refused(ConfigError, r"within writing\(\)", {"params": more})
    other = share(group, foreign)
    if journal:
        refused(ConfigError, "share_parameters=True", {"params": foreign})
    del other

    optimizer.add_param_group({"params": more, "lr": 0.02})
    reference.add_param_group({"params": alone_more, "lr": 0.02})
    for step in range(1, 4):
        give(step, shared + more, alone + alone_more)
        optimizer.step()
        reference.step()
    assert all(map(same_bits, shared + more, alone + alone_more))
    optimizer.consolidate_state_dict()
    if group.rank == 0:
        assert_same_state(optimizer.state_dict(), reference.state_dict())


class Counting(optim.SGD):
    """Counts its steps in its parameter groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


@kept_ranks(2)
def test_what_cannot_have_a_journal_is_refused_on_every_rank(group: Any) -> None:
    def refused(words: str, held: Any, optimizer_class: Any = optim.AdamW, **options: Any) -> None:
        held = list(held)
        give(0, held)
        before = [parameter.detach().clone() for parameter in held]
        with pytest.raises(ConfigError, match=f"(?s)journal.*{words}"):
            ShardedOptimizer(
                held, optimizer_class, process_group=group, journal=True, **{"lr": 0.1, **options}
            ).step()
        assert all(map(same_bits, held, before))

    wrapped = share(group, parameters_of())
    refused("Choosy, which gets whole parameters", wrapped.parameters(), Choosy, sums=True)
    refused("Counting, which steps all at once", wrapped.parameters(), Counting)
    refused("share_parameters=True", parameters_of())
    others = share(group, parameters_of())
    refused("share_parameters=True", [*list(wrapped.parameters())[:2], *list(others.parameters())[2:]])


@kept_ranks(4, group="gloo")
def test_several_hosts_are_refused(rank: int) -> None:
    be_on_host(rank // 2)
    shared = parameters_of()
    ddp = share(None, shared)
    optimizer = ShardedOptimizer(ddp.parameters(), optim.SGD, lr=0.1, journal=True)
    give(0, shared)
    with pytest.raises(ConfigError, match="4 ranks, of which this host has 2"):
        optimizer.step()


@kept_ranks(3)
def test_survivors_finish_a_step_with_its_own_hyperparameters(group: Any) -> None:
    journal_layout.BLOCK_BYTES = 1024
    shared, alone = parameters_of(), parameters_of()
    ddp = share(group, shared)

    class Failing(optim.AdamW):
        left = -1

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            self.left -= 1
            if not self.left:
                raise RuntimeError("in the middle")

    optimizer = ShardedOptimizer(ddp.parameters(), Failing, process_group=group, journal=True, lr=0.01)
    reference = optim.AdamW(alone, lr=0.01)
    for step in range(2):
        give(step, shared, alone)
        reference.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01 * (1 + step)
        reference.step()
        if step == 0:
            optimizer.step()
        elif group.rank == 1:
            optimizer.optim.left = 2  # it raises in its second block
            with pytest.raises(RuntimeError, match="in the middle"):
                optimizer.step()
        else:
            with pytest.raises(PeerLostError, match="in the middle") as caught:
                optimizer.step()
            assert caught.value.step_is_complete
            assert all(map(same_bits, shared, alone))
            optimizer.consolidate_state_dict()
            assert_same_state(optimizer.state_dict(), reference.state_dict())
