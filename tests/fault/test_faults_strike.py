"""The actions of the tests are those of the core, and a fault that is not armed does nothing."""

from __future__ import annotations

import pytest

from paceline import _core
from tests.fault.faults import Action, Fault, Point, kill


def test_actions_are_those_of_the_core():
    assert {action.name.lower(): action.value for action in Action} == _core.FAULT_ACTIONS


def test_a_fault_says_what_it_is():
    assert str(kill(rank=2, step=3, at=Point.AFTER_POST)) == "kill rank 2 at after_post"
    assert str(Fault(0, Action.STOP, Point.SEND, nth=2)) == "stop rank 0 at send (2)"


@pytest.mark.parametrize(("rank", "step"), [(0, 1), (1, 0), (2, 2)])
def test_only_the_rank_and_step_that_are_meant_are_armed(rank, step, monkeypatch):
    armed = []
    monkeypatch.setattr(_core, "arm_fault", lambda *fault: armed.append(fault))
    kill(rank=1, step=2, at=Point.SEND).arm(rank, step)
    assert not armed
    kill(rank=rank, step=step, at=Point.SEND).arm(rank, step)
    assert armed == [(Point.SEND, Action.KILL, 1)]
