"""The state of one model's backward that hooks and the end of the backward share."""

from __future__ import annotations

import os

import pytest

from paceline.errors import ConfigError, ForkedError
from paceline.reducer.backward.state import IDLE, RUNNING, BackwardState


@pytest.fixture
def state():
    return BackwardState(1, 2)


def test_a_gradient_that_cannot_be_averaged_waits_for_the_end_of_the_backward(state):
    first, second = ConfigError("first"), ConfigError("second")
    state.refuse(3, first)
    state.refuse(4, second)
    assert (state.status.refused, state.refusal) == (3, first)


def test_where_no_backward_will_end_it_is_raised_at_once(state):
    state.is_syncing = False
    with pytest.raises(ConfigError, match="alone"):
        state.refuse(3, ConfigError("alone"))
    assert state.refusal is None


def test_the_next_backward_knows_nothing_of_the_one_before(state):
    state.phase = RUNNING
    state.staged.append(0)
    state.accumulated.add(1)
    state.status.forwards = 2
    state.refuse(3, ConfigError("first"))
    state.begin_next()
    assert state.phase is IDLE and not state.staged and not state.accumulated and len(state.handed) == 0
    assert (state.status.forwards, state.status.refused, state.refusal) == (0, None, None)


def test_a_forked_child_gets_an_error_that_it_has_no_memory(state, monkeypatch):
    state.check_process()
    wrapped_in = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: wrapped_in + 1)
    with pytest.raises(ForkedError, match=f"wrapped in process {wrapped_in}"):
        state.check_process()
