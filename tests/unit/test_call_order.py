"""The order of models' calls over a process group; without one."""

from __future__ import annotations

import pytest

from paceline.errors import PeerLostError
from paceline.reducer.call_order import CallOrder


class Model:
    """A model that makes a backward."""

    def __init__(self, order: CallOrder) -> None:
        self.reducer = object()
        self.is_interrupted = False
        self.given_up = 0
        self.order = order

    def give_up_for_others(self) -> None:
        self.order.give_up_before(self)
        self.given_up += 1
        self.is_interrupted = False
        self.order.end(self)

    @property
    def may_launch(self) -> bool:
        return self.order.is_turn_of(self.reducer)


@pytest.fixture
def order():
    return CallOrder()


@pytest.fixture
def models(order):
    return [Model(order) for _ in range(3)]


def test_without_a_backward_all_models_may_make_calls(models):
    assert all(model.may_launch for model in models)


def test_backwards_make_their_calls_in_the_order_in_which_they_began(order, models):
    for model in (models[2], models[0], models[2]):
        order.begin(model)
    assert [model.may_launch for model in models] == [False, False, True]
    order.end(models[2])
    assert [model.may_launch for model in models] == [True, False, False]
    order.end(models[1])  # which made none
    order.end(models[0])
    assert all(model.may_launch for model in models)


def test_what_was_interrupted_is_given_up_before_others_begin(order, models):
    for model in models[:2]:
        order.begin(model)
    for model in models[:2]:
        model.is_interrupted = True
    order.begin(models[2])
    assert [model.given_up for model in models] == [1, 1, 0]
    assert models[2].may_launch


def test_a_backward_that_is_given_up_lets_those_before_it_be_given_up_first(order, models):
    for model in models:
        order.begin(model)
    for model in models:
        model.is_interrupted = True
    models[1].give_up_for_others()
    assert [model.given_up for model in models] == [1, 1, 0]
    assert models[2].may_launch


def test_where_giving_up_fails_no_model_makes_other_calls(order, models, monkeypatch):
    def fail():
        raise PeerLostError("Rank 1 of 2 died.", lost=(1,))

    order.begin(models[0])
    models[0].is_interrupted = True
    monkeypatch.setattr(models[0], "give_up_for_others", fail)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            order.begin(models[1])
    assert not models[1].may_launch
