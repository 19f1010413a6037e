"""What is known of a model's steps, from the reducer in use, from earlier ones and of sparse gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.reducer.backward.earlier_reducers import EarlierReducers
from paceline.reducer.backward.figures import Figures


class Model:
    """A model of two dense parameters and a sparse one, on rank 1 of 2."""

    def __init__(self, path: str = "memory") -> None:
        self.norm, self.unused, self.nonfinite = 9.0, [], [(1, 1)]
        self.are_unchanged = True
        self.reducer = SimpleNamespace(
            waited_s=2.0,
            waited_for_ns=[2_000_000_000, 0],
            worked_ns=[[10**9, 3 * 10**9, 2 * 10**9], []],
            arrivals=(3, (0, 0), (3, 0), (6_000_000_000, 0)),
            squared_norm=lambda: self.norm,
            nonfinite=lambda: self.nonfinite,
            globally_unused=lambda: self.unused,
            unused=lambda rank: [0] if rank == 1 else [],
        )
        self.sparse = SimpleNamespace(squared_norm=16.0, nonfinite=[(1, 2), (0, 2)])
        buckets = [SimpleNamespace(nbytes=64), SimpleNamespace(nbytes=128)]
        self.planning = SimpleNamespace(
            communicator=SimpleNamespace(rank=1, world_size=2, path=path, bits="world"),
            reduction=SimpleNamespace(plan=SimpleNamespace(buckets=buckets), reducer=self.reducer),
            earlier=EarlierReducers(2),
        )

    def figures(self, *, asks_for_nonfinite: bool = True) -> Figures:
        tensors = SimpleNamespace(names=["w", "b"], all_names=["w", "b", "embed"])
        front_end: Any = SimpleNamespace(tensors=tensors, sparse=self.sparse)
        fresh: Any = SimpleNamespace(are_unchanged=lambda: self.are_unchanged)
        return Figures(front_end, self.planning, fresh, asks_for_nonfinite=asks_for_nonfinite)


def test_the_norm_is_that_of_all_gradients():
    assert Model().figures().squared_norm() == 25.0


def test_infinities_have_the_names_of_all_parameters():
    assert Model().figures().nonfinite() == {0: ("embed",), 1: ("b", "embed")}


def test_a_norm_is_known_as_long_as_the_gradients_are_its_own():
    model = Model()
    assert model.figures().known_norm() == 5.0
    model.are_unchanged = False
    assert model.figures().known_norm() is None


def test_of_a_void_backward_no_norm_is_known():
    model = Model()
    model.norm = math.nan
    assert model.figures().known_norm() is None


def test_parameters_that_nobody_used_may_have_gradients_that_count():
    model = Model()
    model.unused = [1]
    assert model.figures().known_norm() is None


@pytest.mark.parametrize(
    ("path", "asks", "looks"),
    [("memory", False, True), ("hosts", False, True), ("group", False, False), ("group", True, True)],
)
def test_infinities_are_known_where_somebody_looks(path, asks, looks):
    figures = Model(path).figures(asks_for_nonfinite=asks)
    assert figures.looks_for_nonfinite == looks
    assert bool(figures.statistics(3).nonfinite) == looks


def test_the_statistics_are_of_all_reducers():
    model = Model()
    model.planning.earlier.add(model.reducer)
    statistics = model.figures().statistics(6)
    assert (statistics.rank, statistics.world_size, statistics.passes) == (1, 2, 6)
    assert (statistics.waited_s, statistics.waited_for_s) == (4.0, (4.0, 0.0))
    assert (statistics.times_last, statistics.held_up_s) == ((6, 0), (12.0, 0.0))
    assert statistics.worked_s == (2.0,)  # of the reducer in use: the last backward passes
    assert (statistics.num_buckets, statistics.pass_bytes, statistics.num_unused) == (2, 192, 1)


def test_before_the_first_good_backward_nothing_is_unused():
    assert Model().figures().statistics(0).num_unused == 0
