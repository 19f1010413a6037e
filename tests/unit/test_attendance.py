"""Who has come to a job: the verdict is a pure function, and every rank comes to the same one."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from paceline.errors import RendezvousError
from paceline.rendezvous import attendance
from paceline.rendezvous.attendance import Arrival, attend, misfit


class Memory:
    """A ledger of this process."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counters = Counter()
        self._words = {}

    def add(self, key, amount):
        with self._lock:
            self._counters[key] += amount
            return self._counters[key]

    def write(self, key, value):
        self._words[key] = value

    def read(self, key):
        return self._words.get(key)


def arrival(rank, world_size=3, host="node0", pid=100, job=""):
    return Arrival(rank, world_size, host, pid + rank, job)


def attend_all(arrivals, timeout_s=30.0):
    """What each of them got: None, or the error."""
    ledger, outcomes = Memory(), [None] * len(arrivals)

    def run(place, own):
        try:
            attend(ledger, "start", own, timeout_s)
        except RendezvousError as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(arrivals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


def test_ranks_that_fit_go_on():
    assert attend_all([arrival(rank) for rank in (2, 0, 1)]) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "summary", "words"),
    [
        (arrival(2, world_size=4, host="node1"), "world size", ("expects 3 ranks", "expects 4", "node1")),
        (arrival(1, host="node1", pid=700), "claim rank 1", ("pid 101", "pid 701", "node0", "node1")),
        (arrival(2, host="node1", job="beef"), "Two jobs", ("without an id", "beef", "node1")),
    ],
)
def test_every_rank_is_told_at_once_who_does_not_fit(odd, summary, words):
    begun = time.monotonic()
    outcomes = attend_all([arrival(0), arrival(1), odd])
    assert time.monotonic() - begun < 20  # and not after the 30 s
    for error in outcomes:
        assert summary in error.summary
        assert all(word in error.seen for word in words), error.seen


def test_who_comes_to_a_complete_job_is_refused_alone():
    ledger = Memory()
    attend(ledger, "start", arrival(0, world_size=1), 10.0)
    with pytest.raises(RendezvousError, match="claim rank 0") as caught:
        attend(ledger, "start", arrival(0, world_size=1, pid=200), 10.0)
    assert caught.value.ranks == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"x": 1}',
        "[" * 100_000,
        '{"rank": "0", "world_size": 3, "host": "a", "pid": 1, "job": ""}',
        '{"rank": true, "world_size": 3, "host": "a", "pid": 1, "job": ""}',
    ],
    ids=lambda text: text[:12] or "nothing",
)
def test_what_a_stranger_has_written_is_told_as_such(text):
    ledger = Memory()
    ledger.write(f"start/arrival/{ledger.add('start/arrivals', 1)}", text)
    with pytest.raises(RendezvousError, match="no rank of Paceline has written") as caught:
        attend(ledger, "start", arrival(0), 10.0)
    assert "rank 0 on host node0" in caught.value.where


def test_who_is_missing_is_named_at_the_deadline():
    first, second = attend_all([arrival(0), arrival(2, host="node1")], timeout_s=0.2)
    for error in (first, second):
        assert error.missing == (1,)
        assert "rank 2 on host node1 (pid 102)" in error.seen


def test_nothing_speaks_against_ranks_that_are_not_all_there():
    assert misfit(arrival(0), []) is None
    assert misfit(arrival(0), [arrival(0), arrival(2)]) is None


@pytest.mark.parametrize("call", ["add", "write", "read"])
def test_a_store_that_does_not_answer_ends_at_the_deadline(call, monkeypatch):
    """As torch's does while the process of rank 0 is stopped."""
    monkeypatch.setattr(attendance, "_ANSWER_WITHIN_S", 0.5)
    ledger, is_over = Memory(), threading.Event()
    monkeypatch.setattr(ledger, call, lambda *_: is_over.wait(60))
    with pytest.raises(RendezvousError, match="the store of this job does not answer") as caught:
        attend(ledger, "start", arrival(1), 0.5)
    is_over.set()
    assert "rank 1 on host node0 (pid 101)" in str(caught.value)
    assert "is stopped" in caught.value.likely
