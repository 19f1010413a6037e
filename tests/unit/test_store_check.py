"""The missing ranks, by a framework's store: only ranks that have not answered."""

from __future__ import annotations

import os
import time
import traceback

import pytest

from paceline.errors import PeerLostError, RendezvousError
from paceline.health import store_check
from paceline.health.store_check import Missing, StoreChecks


class KeyStore(dict):
    """A store of one process; the test writes the values of other ranks."""

    write = dict.__setitem__
    read = dict.get


class Gone:
    """The store of a process that has ended."""

    def write(self, key, value):
        raise RuntimeError("connection closed")

    read = write


class Never:
    """A call that no other rank makes."""

    def is_completed(self):
        return False


@pytest.fixture
def checks():
    key_store = KeyStore()
    StoreChecks(key_store, 1, 2, None, "the test's group")  # this process acts as rank 1, too
    return StoreChecks(key_store, 0, 2, None, "the test's group")


def test_a_rank_that_answered_before_it_ended_is_not_missing(checks, monkeypatch):
    """The rank answers and ends between the check of its answer and the check of its process."""

    def process_state(pid):
        assert pid == os.getpid()
        checks.key_store.write("paceline/check/0/0/1/answer/1", "1")
        return ""

    monkeypatch.setattr(store_check, "process_state", process_state)
    assert checks.begin().missing() == []


def test_a_rank_that_ended_without_an_answer_is_missing(checks, monkeypatch):
    monkeypatch.setattr(store_check, "process_state", lambda pid: "")
    assert checks.begin().missing() == [Missing(1, f"(pid {os.getpid()}) has died")]


def test_an_answer_to_an_earlier_check_does_not_count(checks, monkeypatch):
    monkeypatch.setattr(store_check, "process_state", lambda pid: "")
    checks.key_store.write("paceline/check/0/0/1/answer/1", "1")
    assert checks.begin().missing() == []
    assert [each.rank for each in checks.begin().missing()] == [1]


def test_a_call_that_is_late_names_who_does_not_answer(checks, monkeypatch):
    monkeypatch.setattr(store_check, "process_state", lambda pid: "T")
    with pytest.raises(RendezvousError) as raised:
        checks.complete(Never, "all_gather", 0.05, time.monotonic() + 0.05)
    assert raised.value.missing == (1,)
    assert f"rank 1 (pid {os.getpid()}) is stopped: `kill -CONT {os.getpid()}`" in str(raised.value)
    assert "Rank 0 of 2 gave up waiting for the other ranks after 0.1 s." in str(raised.value)
    assert "all_gather over the test's group" in str(raised.value)


class Fails:
    """A call that raises what its process group has noticed."""

    def __init__(self, error):
        self._error = error

    def is_completed(self):
        return True

    def wait(self):
        raise self._error


@pytest.mark.parametrize(
    ("noticed", "shown"),
    [
        (RuntimeError("Connection closed by peer"), "Connection closed by peer"),
        (
            PeerLostError("Rank 1 of 2 left the group.", seen="rank 1 (pid 7) has left", likely="it exited"),
            "Rank 1 of 2 left the group.\nrank 1 (pid 7) has left",
        ),
    ],
)
def test_what_the_process_group_has_noticed_is_shown_once(checks, monkeypatch, noticed, shown):
    monkeypatch.setattr(store_check, "process_state", lambda pid: "")
    with pytest.raises(RendezvousError) as raised:
        checks.complete(lambda: Fails(noticed), "all_gather", 1.0, time.monotonic() + 1.0)
    assert raised.value.seen == f"rank 1 (pid {os.getpid()}) has died\n{shown}"
    assert "".join(traceback.format_exception(raised.value)).count(shown.split("\n")[0]) == 1
    assert "exited" in raised.value.likely and "every rank" in raised.value.hint


def test_a_store_that_is_gone_was_served_by_its_holder():
    checks = StoreChecks(Gone(), 0, 3, 2, "the test's group")
    assert checks.begin().missing() == [Missing(2, "is gone, and the store with it")]


def test_no_rank_is_named_where_there_is_no_store():
    checks = StoreChecks(None, 0, 2, None, "the test's group")
    with pytest.raises(RendezvousError, match="nothing says which rank is missing"):
        checks.complete(Never, "all_gather", 0.0, time.monotonic())
