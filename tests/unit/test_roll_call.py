"""Who is missing, by torch's store: only ranks that have not answered."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from paceline.torch import roll_call
from paceline.torch.roll_call import Missing, RollCall, say_where


@pytest.fixture
def group():
    """A process group of this process alone, whose store the test writes to for a second rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_rank_that_answered_before_it_ended_is_not_missing(group, monkeypatch):
    """The rank answers and ends between the look at its answer and the look at its process."""
    say_where(group, 1)  # this process stands in for rank 1
    store = dist.distributed_c10d._get_process_group_store(group)
    roll = RollCall(group, 0, 2)

    def process_state(pid):
        assert pid == os.getpid()
        store.set(f"{roll._prefix}/answer/1", "1")
        return ""

    monkeypatch.setattr(roll_call, "process_state", process_state)
    assert roll.missing() == []


def test_a_rank_that_ended_without_an_answer_is_missing(group, monkeypatch):
    say_where(group, 1)
    monkeypatch.setattr(roll_call, "process_state", lambda pid: "")
    assert RollCall(group, 0, 2).missing() == [Missing(1, f"(pid {os.getpid()}) has died")]
