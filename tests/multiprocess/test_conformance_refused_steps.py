"""Steps of a ShardedOptimizer in which the framework's optimizer raises, in both front ends.

The reference of a step is plain numpy, in float64, from the means that backward has left.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError, PeerLostError, TornStepError
from tests.harness import kept_ranks
from tests.multiprocess.rank_signals import publish, wait_until_published
from tests.multiprocess.test_conformance import adapter, close
from tests.several_hosts import be_on_host

LR, MOMENTUM = 0.1, 0.5
LONG_S = 90.0  # no rank waits this long: the others get the error at once
frameworks = pytest.mark.parametrize("framework", ["torch", "paddle"])

# The host of each rank, options of the wrapper, and options of the optimizer.
KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "own": ((0, 0), {}, {}),
    "shared": ((0, 0), {"share_parameters": True}, {}),
    "journal": ((0, 0), {"share_parameters": True}, {"journal": True}),
    "over a group": ((0, 0), {}, {"reduce_through": "group"}),
    "shared, over a group": ((0, 0), {"share_parameters": True}, {"reduce_through": "group"}),
    "hosts": ((0, 1), {}, {}),
    "hosts of two": ((0, 0, 1, 1), {}, {}),
    "hosts of two, shared": ((0, 0, 1, 1), {"share_parameters": True}, {}),
    "uneven hosts, shared": ((0, 1, 1), {"share_parameters": True}, {}),
}


class Training:
    """One rank's model and optimizer after two steps, and the expected parameters.

    Args:
        size: Width of the square matrices; with 1 only one rank has a shard.
    """

    def __init__(self, rank: int, framework: str, kind: str, size: int = 60) -> None:
        layout, wrapping, options = KINDS[kind]
        be_on_host(layout[rank])
        adapter(f"{framework}.distributed").join(rank, len(layout))
        self.do: ModuleType = adapter(framework)
        self.do.Refusing.refuses = None
        self.rank, self.size = rank, size
        self.model = self.do.layers(2 if size > 1 else 1, size)
        self.wrapped = self.do.wrap(self.model, None, timeout_s=LONG_S, **wrapping)
        self.optimizer = self.do.sharded(self.wrapped, LR, MOMENTUM, timeout_s=LONG_S, **options)
        self.has_shard = bool(self.optimizer._shards.own)
        self.expected = [each.astype(np.float64) for each in self.do.parameters(self.model)]
        self.velocity = [np.zeros_like(each) for each in self.expected]
        self.number = 0
        for _ in range(2):
            self.step()

    def backward(self) -> None:
        self.do.clear(self.wrapped)
        self.number += 1
        x = np.random.default_rng([self.number, self.rank]).standard_normal((3, self.size))
        self.do.backward(self.do.loss(self.wrapped, x.astype(np.float32)))

    def expect_step(self) -> None:
        for place, gradient in enumerate(self.do.gradients(self.model)):
            self.velocity[place] = MOMENTUM * self.velocity[place] + gradient
            self.expected[place] = self.expected[place] - LR * self.velocity[place]

    def step(self) -> None:
        self.backward()
        self.expect_step()
        self.optimizer.step()
        self.check()

    def check(self) -> None:
        close(self.do.parameters(self.model), self.expected)


kinds = pytest.mark.parametrize(("kind", "world_size"), [(kind, len(row[0])) for kind, row in KINDS.items()])
journals = pytest.mark.parametrize(
    ("kind", "world_size"), [(kind, len(row[0])) for kind, row in KINDS.items() if row[2].get("journal")]
)
PLAIN = [(kind, len(row[0])) for kind, row in KINDS.items() if not row[2].get("journal")]


def plain(first: str, second: str) -> pytest.MarkDecorator:
    """The kinds without a journal, each with one of two frameworks in turn."""
    cases = [(*kind, (first, second)[number % 2]) for number, kind in enumerate(PLAIN)]
    return pytest.mark.parametrize(("kind", "world_size", "framework"), cases)


def refuse(training: Training, when: str) -> None:
    """Make a step in which the optimizer of each rank that has a shard raises."""
    training.do.Refusing.refuses = when if training.has_shard else None
    training.backward()
    with pytest.raises(ValueError if training.has_shard else ConfigError, match="no such step"):
        training.optimizer.step()
    training.do.Refusing.refuses = None


@pytest.mark.parametrize("size", [60, 1])  # of matrices of which each rank has a shard, or only one rank
@kinds
@frameworks
@kept_ranks("world_size", group=None, framework="framework", deadline_s=240)
def test_a_step_that_all_ranks_refuse_is_an_error_of_the_call(
    rank: int, framework: str, kind: str, world_size: int, size: int
) -> None:
    """Nothing was written, so the model, the optimizer and the group remain usable."""
    training = Training(rank, framework, kind, size)
    for _ in range(2):
        refuse(training, "before")
        training.check()
        training.optimizer.step()  # with the same gradients
        training.expect_step()
        training.check()
        training.step()
    training.wrapped.check_replicas()
    training.optimizer.consolidate_state_dict()


@journals
@frameworks
@kept_ranks("world_size", group=None, framework="framework")
def test_a_journal_takes_back_what_a_refused_step_has_written(
    rank: int, framework: str, kind: str, world_size: int
) -> None:
    training = Training(rank, framework, kind)
    refuse(training, "after")
    training.check()
    training.step()


@plain("torch", "paddle")
@kept_ranks("world_size", group=None, framework="framework", deadline_s=240)
def test_a_step_in_which_all_ranks_raise_after_writing_is_partial(
    rank: int, framework: str, kind: str, world_size: int
) -> None:
    training = Training(rank, framework, kind)
    training.backward()
    training.do.Refusing.refuses = "after" if training.has_shard else None
    with pytest.raises(ValueError if training.has_shard else PeerLostError, match="no such step"):
        training.optimizer.step()
    publish("has raised", rank)
    wait_until_published("has raised", range(world_size))
    with pytest.raises(TornStepError):
        training.backward()


@plain("paddle", "torch")
@kept_ranks("world_size", group=None, framework="framework", deadline_s=240)
def test_a_step_that_one_rank_refuses_is_partial(
    rank: int, framework: str, kind: str, world_size: int
) -> None:
    """The others have written their shards. All ranks raise at once, and none goes on with a partial step."""
    training = Training(rank, framework, kind)
    training.backward()
    training.do.Refusing.refuses = "before" if rank == 1 else None
    with pytest.raises(ValueError if rank == 1 else PeerLostError, match="no such step") as caught:
        training.optimizer.step()
    if rank != 1:
        assert caught.value.lost == (1,)
        assert caught.value.step_is_complete is False
    publish("has raised", rank)
    wait_until_published("has raised", range(world_size))
    with pytest.raises(TornStepError):
        training.backward()


@journals
@frameworks
@kept_ranks("world_size", group=None, framework="framework")
def test_with_a_journal_the_others_update_the_shard_of_a_rank_that_refuses(
    rank: int, framework: str, kind: str, world_size: int
) -> None:
    training = Training(rank, framework, kind)
    training.backward()
    training.expect_step()
    training.do.Refusing.refuses = "after" if rank == 1 else None
    with pytest.raises(ValueError if rank == 1 else PeerLostError, match="no such step") as caught:
        training.optimizer.step()
    if rank != 1:
        assert caught.value.lost == (1,)
        assert caught.value.step_is_complete is True
    publish("has raised", rank)
    wait_until_published("has raised", range(world_size))
    training.check()
