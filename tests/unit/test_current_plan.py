"""When a model's gradients get another plan, and the order in which the parts of the wrapper are updated."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import _core
from paceline.reducer.backward.current_plan import CurrentPlan
from paceline.reducer.backward.statistics import BackwardStatistics
from paceline.reducer.communicator import Reduction
from paceline.reducer.owners import OwnedRange
from paceline.reducer.plan import ParameterSpec

NAMES, NUMEL = ["a", "b", "c"], 16384  # one segment each, so that each may be a bucket
COUNT = len(NAMES)


@dataclass
class Options:
    """Options of a wrapped model: each parameter has a bucket of its own."""

    first_bucket_bytes: int = 1
    bucket_cap_bytes: int = 1
    bucket_caps_bytes: tuple[int, ...] = ()
    nonfinite: str = "warn"
    gradients_in_buffer: bool = False
    skip_unused: bool = False


@dataclass
class World:
    """The collaborators of current_plan; `events` records their calls."""

    any_in_buffer: bool = False
    order_of_rank_0: tuple[int, ...] = tuple(range(COUNT))
    events: list[str] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    """Options and `instead_of` of each reduction."""

    def __post_init__(self) -> None:
        front_end: Any = SimpleNamespace(
            gradients=SimpleNamespace(fingerprint=list, memory=lambda: None),
            tensors=SimpleNamespace(names=NAMES, all_names=NAMES),
            sparse=SimpleNamespace(squared_norm=0.0, nonfinite=[]),
        )
        self.statistics = BackwardStatistics(front_end, self.communicator(), asks_for_nonfinite=True)

    def current_plan(self, options: Options | None = None) -> CurrentPlan:
        front_end = SimpleNamespace(
            tensors=SimpleNamespace(names=NAMES, trainable=[object()] * COUNT),
            gradients=SimpleNamespace(
                specs=lambda *, whole: [ParameterSpec(name, NUMEL, "float32", 4, "cpu") for name in NAMES],
                adopt=lambda reduction: self.events.append("gradients move"),
                any_in_buffer=self.any_in_buffer,
            ),
            autograd=SimpleNamespace(install=lambda: self.events.append("hooks")),
        )
        return CurrentPlan(
            front_end,
            self.communicator(),
            options or Options(),
            self.statistics,
            lambda communicator, plan: self.events.append("notified"),
        )

    def communicator(self) -> Any:
        return SimpleNamespace(
            world_size=2,
            wants_whole_buckets=False,
            most_bucket_bytes=None,
            make_reduction=self._make_reduction,
            all_gather=lambda payload: [struct.pack(f"{COUNT}i", *self.order_of_rank_0), payload],
            with_hook=lambda hook, process_group: self.communicator(),
        )

    def _make_reduction(self, plan: Any, parameters: Any, options: Any, instead_of: Any) -> Any:
        self.asked.append((options, instead_of))
        number = len(self.asked)
        times = _core.BackwardTimes(2)
        times.waited_ns = 10**9
        reducer = SimpleNamespace(
            times=times,
            squared_norm=lambda: float(number),
            close=lambda: self.events.append(f"reducer {number} ends"),
        )
        return Reduction(plan, [], reducer, most_pointer_bytes=0, owned=options.owned)


@pytest.fixture
def world():
    return World()


def test_it_begins_with_the_reverse_of_registration(world):
    current_plan = world.current_plan()
    assert current_plan.reduction.plan.order == (2, 1, 0)
    assert not current_plan.is_order_final
    assert world.events == ["gradients move", "notified"]


def test_the_order_of_rank_0_becomes_the_plan_of_all(world):
    world.order_of_rank_0 = (1, 2, 0)
    current_plan = world.current_plan()
    world.events.clear()
    current_plan.adopt_order([0, 1])
    assert current_plan.reduction.plan.order == (1, 2, 0)
    assert current_plan.is_order_final
    assert world.events == ["gradients move", "notified", "hooks"]


def test_an_order_that_was_expected_changes_nothing(world):
    world.order_of_rank_0 = (2, 1, 0)
    current_plan = world.current_plan()
    before = current_plan.reduction
    current_plan.adopt_order([2, 1, 0])
    assert current_plan.is_order_final and current_plan.reduction is before


def test_with_one_bucket_no_order_is_worth_a_question(world):
    assert world.current_plan(Options(first_bucket_bytes=1 << 30, bucket_cap_bytes=1 << 30)).is_order_final


def test_a_buffer_that_is_free_may_be_used_again(world):
    current_plan = world.current_plan()
    before = current_plan.reduction
    current_plan.adopt_order([0, 1, 2])
    assert [instead_of for _, instead_of in world.asked] == [None, before]
    assert "reducer 1 ends" not in world.events  # the maker of the next one decides


def test_gradients_that_live_in_a_buffer_move_before_it_goes(world):
    world.any_in_buffer = True
    current_plan = world.current_plan()
    world.events.clear()
    current_plan.adopt_order([0, 1, 2])
    assert [instead_of for _, instead_of in world.asked] == [None, None]
    assert world.events == ["gradients move", "notified", "reducer 1 ends", "hooks"]


def test_figures_outlive_their_reducer(world):
    current_plan = world.current_plan()
    current_plan.adopt_order([0, 1, 2])
    assert world.statistics.waited_s == 2.0
    assert world.statistics.squared_norm() == 1.0


def test_a_hook_gets_the_buckets_in_the_order_that_is_known(world):
    world.order_of_rank_0 = (1, 2, 0)
    current_plan = world.current_plan()
    current_plan.adopt_order([1, 2, 0])
    before = current_plan.communicator
    current_plan.use_hook(object(), None)
    assert current_plan.communicator is not before
    assert current_plan.reduction.plan.order == (1, 2, 0)
    assert current_plan.is_order_final


def test_owners_make_a_plan_once(world):
    owned = ((OwnedRange(0, 4 * NUMEL, 0),),) * COUNT
    current_plan = world.current_plan()
    current_plan.use_owners(owned)
    current_plan.use_owners(tuple(owned))
    assert [options.owned for options, _ in world.asked] == [(), owned]
    current_plan.adopt_order([0, 1, 2])  # scattered parameters stay so, in separate memory
    assert [options.owned for options, _ in world.asked] == [(), owned, owned]
    assert world.asked[-1][1] is None


@pytest.mark.parametrize(
    ("nonfinite", "checks", "waits"), [("ignore", False, False), ("warn", True, False), ("raise", True, True)]
)
def test_infinities_are_looked_for_as_asked(world, nonfinite, checks, waits):
    world.current_plan(replace(Options(), nonfinite=nonfinite))
    options, _ = world.asked[0]
    assert (options.checks_finite, options.waits_for_finite) == (checks, waits)
