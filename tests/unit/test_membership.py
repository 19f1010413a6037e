"""The ranks that have come to a job: the verdict is a pure function, and every rank reaches the same one."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from paceline.errors import RendezvousError
from paceline.rendezvous import membership
from paceline.rendezvous.membership import Arrival, attend, mismatch
from paceline.rendezvous.signatures import Signatures


class Memory:
    """A membership store of this process."""

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


@pytest.fixture(autouse=True)
def _do_not_linger(monkeypatch):
    """This membership store outlives rank 0."""
    monkeypatch.setattr(membership, "_LINGER_S", 0.0)


def arrival(rank, world_size=3, host="node0", pid=100, job="", paceline="0.1.0", **others):
    return Arrival(rank, world_size, host, pid + rank, job, paceline, "torch 2.13.0", **others)


SECRET = b"0123456789abcdef"


def attend_all(arrivals, timeout_s=30.0, secrets=None):
    """The result of each: None, or the error."""
    membership_store, outcomes = Memory(), [None] * len(arrivals)
    secrets = secrets or [b""] * len(arrivals)

    def run(place, own):
        try:
            attend(membership_store, "start", own, timeout_s, secrets[place])
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
        (
            arrival(2, host="node1", paceline="0.0.9"),
            "different versions",
            ("rank 2 on host node1", "Paceline 0.0.9", "Paceline 0.1.0"),
        ),
        (arrival(2, host="node1", problem="no eth7"), "Rank 2 of 3 cannot join", ("node1", "no eth7")),
        (arrival(2, host="node1", unreachable="lo"), "Rank 2 of 3 cannot join", ("node1", "lo")),
    ],
)
def test_every_rank_is_reported_at_once_who_does_not_fit(odd, summary, words):
    begun = time.monotonic()
    outcomes = attend_all([arrival(0), arrival(1), odd])
    assert time.monotonic() - begun < 20  # and not after the 30 s
    for error in outcomes:
        assert summary in error.summary
        assert all(word in error.seen for word in words), error.seen


def test_ranks_of_one_host_need_not_be_reached_from_another():
    assert attend_all([arrival(rank, unreachable="lo") for rank in range(3)]) == [None] * 3


def test_ranks_with_one_secret_go_on():
    assert attend_all([arrival(rank) for rank in (2, 0, 1)], secrets=[SECRET] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "words", "own_words"),
    [
        (b"another secret!!", "has another secret than rank {}", "has another secret than rank 2"),
        (b"", "has no secret, and rank {} on host node0 (pid 10{}) has one", "has a secret, and rank 2"),
    ],
)
def test_ranks_with_different_secrets_are_named_at_once(odd, words, own_words):
    begun = time.monotonic()
    arrivals = [arrival(0), arrival(1), arrival(2, host="node1")]
    first, second, third = attend_all(arrivals, secrets=[SECRET, SECRET, odd])
    assert time.monotonic() - begun < 20  # and not after the 30 s
    for rank, error in enumerate((first, second)):
        assert f"rank 2 on host node1 (pid 102) {words.format(rank, rank)}" in error.seen, error.seen
        assert error.hosts == ("node0", "node1") and "PACELINE_SECRET_FILE" in error.hint
    assert own_words in third.seen and "on host node0" in third.seen


def test_rank_0_stays_until_others_have_read_although_it_refuses_the_first_that_it_reads(monkeypatch):
    """The store ends with it. Rank 1, which has come before, must learn there which rank it does not fit."""
    monkeypatch.setattr(membership, "_LINGER_S", 60.0)
    membership_store = Memory()
    membership_store.write(
        f"start/arrival/{membership_store.add('start/arrivals', 1)}", f"- {arrival(1).write()}"
    )

    def refused():
        with pytest.raises(RendezvousError, match="do not have the same secret"):
            attend(membership_store, "start", arrival(0), 30.0, SECRET)

    thread = threading.Thread(target=refused)
    thread.start()
    while not membership_store.add("start/left", 0):
        time.sleep(0.005)
    thread.join(0.2)
    assert thread.is_alive()
    membership_store.add("start/left", 1)
    thread.join(30)
    assert not thread.is_alive()


def test_rank_0_that_has_no_way_to_another_stays_until_that_one_has_read(monkeypatch):
    """It knows the mistake before the other has come to report its view."""
    monkeypatch.setattr(membership, "_LINGER_S", 10.0)
    monkeypatch.setattr(membership, "no_way_to", lambda address: "Network is unreachable")
    membership_store, late = Memory(), Memory()
    vars(late).update(vars(membership_store))
    has_ended = threading.Event()

    def add(key, amount):
        if key == "start/ways/arrivals" and has_ended.wait(0.3):
            raise RuntimeError("Connection reset by peer")
        return membership_store.add(key, amount)

    monkeypatch.setattr(late, "add", add)
    outcomes = {}

    def run(own, membership_store):
        with pytest.raises(RendezvousError) as caught:
            attend(membership_store, "start", own, 30.0)
        outcomes[own.rank] = caught.value.summary
        if own.rank == 0:
            has_ended.set()

    ranks = [arrival(0, 2, "node0"), arrival(1, 2, "node1", address="10.88.1.1", interface="eth1")]
    threads = [threading.Thread(target=run, args=each) for each in zip(ranks, (membership_store, late))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == dict.fromkeys(range(2), "Rank 0 of 2 cannot join.")


@pytest.mark.parametrize("call", ["add", "write", "read"])
def test_a_store_that_is_gone_is_reported_in_words(call, monkeypatch):
    membership_store = Memory()

    def gone(*_):
        raise RuntimeError("Connection reset by peer\nframe #0: ...")

    monkeypatch.setattr(membership_store, call, gone)
    with pytest.raises(RendezvousError, match="Rank 1 of 3 lost the store of this job") as caught:
        attend(membership_store, "start", arrival(1), 30.0)
    assert caught.value.seen == "Connection reset by peer; 0 of 3 ranks had come when it last answered"


def test_an_unknown_peer_who_writes_the_words_of_a_rank_is_not_taken_for_it():
    """It writes in the place of rank 2 the same as that rank would have written, except for the secret."""
    membership_store = Memory()
    membership_store.write(
        f"start/arrival/{membership_store.add('start/arrivals', 1)}", f"{'0' * 32} {arrival(2).write()}"
    )
    with pytest.raises(RendezvousError, match="do not have the same secret") as caught:
        attend(membership_store, "start", arrival(0), 10.0, SECRET)
    assert "an unknown peer claims" in caught.value.likely


def test_what_a_rank_wrote_is_of_no_use_at_another_place():
    """An attacker reads the record of rank 2 and writes it where the next rank is expected."""
    membership_store = Memory()
    key = f"start/arrival/{membership_store.add('start/arrivals', 1)}"
    words = Signatures(SECRET, "membership").sign(key, arrival(2).write().encode()).decode()
    membership_store.write(f"start/arrival/{membership_store.add('start/arrivals', 1)}", words)
    membership_store.write(key, words)
    with pytest.raises(RendezvousError, match="do not have the same secret"):
        attend(membership_store, "start", arrival(0), 10.0, SECRET)


def test_rank_0_says_for_whom_it_waits(monkeypatch, capsys):
    monkeypatch.setattr(membership, "_SAY_EVERY_S", 0.05)
    attend_all([arrival(0), arrival(2, host="node1")], timeout_s=0.5)
    said = capsys.readouterr().err
    assert "rank 0 on host node0 (pid 100) has waited 0 s for rank 1 of 3; 2 came, of node0, node1" in said


def test_who_comes_to_a_complete_job_is_refused_alone():
    membership_store = Memory()
    attend(membership_store, "start", arrival(0, world_size=1), 10.0)
    with pytest.raises(RendezvousError, match="claim rank 0") as caught:
        attend(membership_store, "start", arrival(0, world_size=1, pid=200), 10.0)
    assert caught.value.ranks == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"x": 1}',
        "[" * 100_000,
        '- {"rank": "0", "world_size": 3, "host": "a", "pid": 1, "job": ""}',
        '- {"rank": true, "world_size": 3, "host": "a", "pid": 1, "job": ""}',
        f"- {arrival(1).write()[:-1]}",
        arrival(1).write(),
        "\udcff\udcfe x",
    ],
    ids=lambda text: text[:12] or "nothing",
)
def test_what_an_unknown_peer_has_written_is_reported_as_such(text):
    membership_store = Memory()
    membership_store.write(f"start/arrival/{membership_store.add('start/arrivals', 1)}", text)
    with pytest.raises(RendezvousError, match="no rank of Paceline has written") as caught:
        attend(membership_store, "start", arrival(0), 10.0)
    assert "rank 0 on host node0" in caught.value.where


def test_who_is_missing_is_named_at_the_deadline():
    first, second = attend_all([arrival(0), arrival(2, host="node1")], timeout_s=0.2)
    for error in (first, second):
        assert error.missing == (1,)
        assert "rank 2 on host node1 (pid 102)" in error.seen


def test_nothing_speaks_against_ranks_that_are_not_all_there():
    assert mismatch(arrival(0), []) is None
    assert mismatch(arrival(0), [arrival(0), arrival(2)]) is None


@pytest.mark.parametrize("call", ["add", "write", "read"])
def test_a_store_that_does_not_answer_ends_at_the_deadline(call, monkeypatch):
    """A store that blocks, like torch's while the process of rank 0 is stopped."""
    monkeypatch.setattr(membership, "_ANSWER_WITHIN_S", 0.5)
    membership_store, is_over = Memory(), threading.Event()
    monkeypatch.setattr(membership_store, call, lambda *_: is_over.wait(60))
    with pytest.raises(RendezvousError, match="the store of this job does not answer") as caught:
        attend(membership_store, "start", arrival(1), 0.5)
    is_over.set()
    assert "rank 1 on host node0 (pid 101)" in str(caught.value)
    assert "is stopped" in caught.value.likely


def come_together(secret=b""):
    """A job of two ranks that has come; and a process of another job that comes later, as rank 1, too."""
    membership_store = Memory()
    others = threading.Thread(
        target=attend, args=(membership_store, "start", arrival(0, world_size=2), 30.0, secret), daemon=True
    )
    others.start()
    membership = attend(membership_store, "start", arrival(1, world_size=2), 30.0, secret)
    others.join(30)
    return membership_store, membership


def test_a_latecomer_is_known_to_those_who_have_come():
    membership_store, membership = come_together()
    assert membership.latecomer() is None
    with pytest.raises(RendezvousError, match="claim rank 1"):
        attend(membership_store, "start", arrival(1, world_size=2, host="node1", pid=200), 10.0)
    error = membership.latecomer()
    assert error.summary == "Two processes claim rank 1 of 2."
    assert "rank 1 on host node0 (pid 101)" in error.seen and "rank 1 on host node1 (pid 201)" in error.seen
    assert "two jobs meet at one address" in error.likely


@pytest.mark.parametrize("others", [b"", b"another secret!!"])
def test_a_latecomer_without_the_secret_ends_no_job(others):
    membership_store, membership = come_together(SECRET)
    with pytest.raises(RendezvousError, match="do not have the same secret"):
        attend(membership_store, "start", arrival(1, world_size=2, host="node1"), 10.0, others)
    assert membership.latecomer() is None


def test_a_store_that_is_gone_shows_no_latecomer(monkeypatch):
    monkeypatch.setattr(membership, "_ANSWER_WITHIN_S", 0.1)
    membership_store, complete = come_together()

    def gone(key):
        raise RuntimeError("connection closed")

    monkeypatch.setattr(membership_store, "read", gone)
    assert complete.latecomer() is None
    is_over = threading.Event()
    monkeypatch.setattr(membership_store, "read", lambda key: is_over.wait(60))
    assert complete.latecomer() is None
    is_over.set()
