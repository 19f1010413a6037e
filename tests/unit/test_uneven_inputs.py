"""A rank without data in the steps of others: its gradients, and the source of its model."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.reducer.backward.state import BackwardState
from paceline.reducer.backward.uneven_inputs import Shadow, joining, take_part_until_all_finished


class Gradients:
    """Gradients by parameter."""

    def __init__(self, now: dict[int, str]) -> None:
        self.now = now

    def keep(self) -> dict[int, str]:
        return dict(self.now)

    def restore(self, kept: dict[int, str]) -> None:
        self.now = dict(kept)


class BackwardSync:
    """The backwards of a model, in which this rank is rank 1 of 3.

    Args:
        actives: The ranks that have data in each of the coming backwards.
    """

    who = "rank 1 of 3"
    world_size = 3

    def __init__(self, *actives: list[int]) -> None:
        self.state = BackwardState(1, 3)
        self.gradients = Gradients({0: "own", 1: "own"})
        self.active = [0, 1, 2]
        self.shares_parameters = False
        self.refuses_uneven = False
        self.weights: list[float] = []
        self.roots: list[int] = []
        self.refused: list[bool] = []
        self._actives = list(actives)

    def settle_interrupted(self) -> None:
        """No backward ends in an exception here."""

    def shadow(self, *, weight: float) -> bool:
        self.weights.append(weight)
        self.refused.append(self.refuses_uneven)
        self.gradients.restore({0: "mean"})
        self.active = self._actives.pop(0)
        return bool(self.active)

    def broadcast_model(self, root: int) -> None:
        self.roots.append(root)


def test_the_model_comes_from_a_rank_that_went_on_longest():
    backward_sync = BackwardSync([0, 2], [2], [])
    take_part_until_all_finished(backward_sync, None)
    assert backward_sync.weights == [0.0, 0.0, 0.0]
    assert backward_sync.roots == [2]
    assert backward_sync.gradients.now == {0: "own", 1: "own"}


@pytest.mark.parametrize("before", [[0, 1, 2], []], ids=["all had data", "all had finished before"])
def test_ranks_that_end_together_exchange_no_model(before):
    backward_sync = BackwardSync([])
    backward_sync.active = before
    take_part_until_all_finished(backward_sync, None)
    assert backward_sync.roots == []


def test_what_follows_a_backward_of_the_others_finds_their_means():
    backward_sync = BackwardSync([0, 2], [2], [])
    found = []
    take_part_until_all_finished(backward_sync, lambda: found.append(backward_sync.gradients.now))
    assert found == [{0: "mean"}] * 2


@pytest.mark.parametrize("keeps", [False, True])
def test_what_no_sync_has_accumulated_comes_back_if_asked(keeps):
    backward_sync = BackwardSync()
    backward_sync.state.accumulated.add(1)
    shadow = Shadow(backward_sync, keep_accumulated=keeps)
    assert backward_sync.gradients.now == {}
    backward_sync.state.begin_next()
    shadow.end()
    assert backward_sync.gradients.now == ({0: "own", 1: "own"} if keeps else {0: "own"})
    assert backward_sync.state.accumulated == ({1} if keeps else set())


def test_gradients_come_back_though_a_step_raises():
    backward_sync = BackwardSync([0, 2])

    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        take_part_until_all_finished(backward_sync, fail)
    assert backward_sync.gradients.now == {0: "own", 1: "own"} and backward_sync.roots == []


def test_ranks_that_share_parameters_must_step_along():
    backward_sync = BackwardSync([0, 2])
    backward_sync.shares_parameters = True
    with pytest.raises(ConfigError, match="would not take part in the steps") as raised:
        take_part_until_all_finished(backward_sync, None)
    assert "rank 1 of 3" in str(raised.value)


@pytest.mark.parametrize(("divide_by_all", "weight"), [(True, 1.0), (False, 0.0)])
def test_join_takes_part_at_its_end(divide_by_all, weight):
    backward_sync = BackwardSync([0], [])
    with joining(backward_sync, divide_by_all=divide_by_all, throws=False):
        assert backward_sync.weights == []
    assert backward_sync.weights == [weight, weight]
    assert backward_sync.roots == [0]


def test_join_refuses_uneven_ranks_only_within_it():
    backward_sync = BackwardSync([])
    with joining(backward_sync, divide_by_all=True, throws=True):
        assert backward_sync.refuses_uneven
    assert backward_sync.refused == [True]
    assert not backward_sync.refuses_uneven


def test_an_exception_leaves_join_without_a_call_to_the_others():
    backward_sync = BackwardSync()
    with pytest.raises(OSError), joining(backward_sync, divide_by_all=True, throws=True):
        raise OSError
    assert not backward_sync.refuses_uneven and backward_sync.weights == []
